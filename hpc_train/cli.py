"""The `hpc-train` command: parse, call, print. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from hpc_train import __version__
from hpc_train.arguments import add_run, filled
from hpc_train.errors import ExitCode, HpcTrainError
from hpc_train.launch.arguments import add_launch_parsers
from hpc_train.launch.interactive_arguments import add_interactive_parsers

if TYPE_CHECKING:
    from hpc_train.config import Config

EXAMPLES = """\
examples:
  hpc-train data build src/ --suffix .py --tokenizer byte --out data/code --heldout 0.02
  hpc-train run config.yaml -n 2                            on this machine, by mpirun
  hpc-train submit config.yaml -N 4 --ntasks-per-node=8 -p gpu -t 4:00:00
  hpc-train plan config.yaml -N 32 --fabric clos:pods=4,nodes=32
                                                            which rank goes where, and what it costs
  hpc-train doctor                                          what works here
  hpc-train status
  hpc-train logs 123 -f --rank 5
  hpc-train exec -n 4 -- python my_script.py                any program, with torchrun's variables
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (the table is in errors.py)."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        with _told_when_ended() if options.command in _TOLD_WHEN_ENDED else nullcontext():
            return int(_COMMANDS[options.command](options))
    except HpcTrainError as error:
        if _is_ours_to_say(error):
            print(f"hpc-train: error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt as stop:
        print(f"hpc-train: interrupted{f': {stop}' if str(stop) else ''}", file=sys.stderr)
        return int(ExitCode.INTERNAL)
    except BrokenPipeError:
        # Whoever read our output has enough, as in `hpc-train logs | head`; what is left in the buffer has no reader.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return int(ExitCode.DONE)


_TOLD_WHEN_ENDED = ("data", "plan", "profile")
"""Commands that say so when a TERM ends them. Ranks and drivers handle it in their own ways."""


@contextmanager
def _told_when_ended() -> Iterator[None]:
    """While inside, a TERM ends this process with a word and the code of an interruption.

    Whatever has to be cleaned up has a handler of its own. An exception would not always get through: compiled code
    that imports run into takes it for an error of its own.
    """

    def end(number: int, frame: object) -> None:
        os.write(2, f"hpc-train: interrupted: got {signal.Signals(number).name}\n".encode())
        os._exit(int(ExitCode.INTERNAL))

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _is_ours_to_say(error: HpcTrainError) -> bool:
    """An error that all ranks meet alike names the one rank that prints it."""
    reporter = getattr(error, "reporter", None)
    if reporter is None:
        return True
    from hpc_train.cluster.environment import process_env
    from hpc_train.cluster.process import own_process
    from hpc_train.cluster.situation import rank_hint

    hint = rank_hint(process_env(), own_process())
    return hint is None or hint.rank == reporter


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpc-train",
        description="Train large language models on a Slurm cluster, or on a laptop, by the same commands.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hpc-train {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    from hpc_train.data.arguments import add_data_parser

    add_data_parser(commands)
    add_launch_parsers(commands)
    from hpc_train.launch.plan_arguments import add_plan_parser

    add_plan_parser(commands)
    from hpc_train.launch.profile_arguments import add_profile_parser

    add_profile_parser(commands)
    from hpc_train.health.doctor.arguments import add_doctor_parser

    add_doctor_parser(commands)
    from hpc_train.checkpoint.arguments import add_ckpt_parser

    add_ckpt_parser(commands)
    add_interactive_parsers(commands)
    from hpc_train.observe.trace_arguments import add_trace_parser

    add_trace_parser(commands)
    report = commands.add_parser(
        "report",
        help="loss curve and tables of a run",
        description="Write the report of a run.",
        allow_abbrev=False,
    )
    add_run(report)
    report.add_argument("--out", type=filled, metavar="DIR", help="where to write (default: the run folder)")
    report.add_argument("--json", action="store_true", help="print the figures as JSON instead of the table")
    return parser


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """A command line as its command reads it; ends the process with words where it is none."""
    parser = build_parser()
    ours, verbatim = split_at_dashes(list(arguments))
    options, rest = parser.parse_known_args(ours)
    # argparse gives up on a list of positional arguments at the first option; overrides may follow options.
    if rest and hasattr(options, "overrides") and all(word.strip() and not word.startswith("-") for word in rest):
        options.overrides += rest
    elif rest:
        parser.error(f"unrecognized arguments: {shlex.join(rest)}")
    options.verbatim = verbatim
    if verbatim is not None and options.command not in ("submit", "exec", "doctor", "shell"):
        parser.error(f"nothing may follow `--` after {options.command}")
    return options


def split_at_dashes(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """What stands before the first `--`, and what stands behind it; None where there is none."""
    if "--" not in arguments:
        return arguments, None
    position = arguments.index("--")
    return arguments[:position], arguments[position + 1 :]


def _data(options: argparse.Namespace) -> int:
    from hpc_train.cluster.environment import process_env
    from hpc_train.data.command import run_data_command

    return run_data_command(options, process_env())


def _run(options: argparse.Namespace) -> int:
    from hpc_train.launch.run_command import run_command

    return run_command(options, _be_a_rank)


def _be_a_rank(run_dir: str) -> int:
    from pathlib import Path

    from hpc_train.cluster.scratch import use_private_caches

    if note := use_private_caches():
        print(f"hpc-train: warning: {note}", file=sys.stderr)
    from hpc_train.train.main import run_rank

    return run_rank(Path(run_dir))


def _submit(options: argparse.Namespace) -> int:
    from hpc_train.launch.submit import submit_command

    return submit_command(options)


def _exec(options: argparse.Namespace) -> int:
    from hpc_train.launch.exec import exec_command

    return exec_command(options)


def _plan(options: argparse.Namespace) -> int:
    from hpc_train.launch.plan_command import plan_command

    if options.batch is not None:
        from hpc_train.cluster.scratch import use_private_caches

        if note := use_private_caches():
            print(f"hpc-train: warning: {note}", file=sys.stderr)
    return plan_command(options, _lengths_of_step)


def _lengths_of_step(config: Config, step: int, tell: Callable[[int], None]) -> list[int]:
    from hpc_train.data.steps import lengths_of_step

    return lengths_of_step(config, step, tell)


def _profile(options: argparse.Namespace) -> int:
    from hpc_train.launch.profile_command import profile_command

    return profile_command(options)


def _status(options: argparse.Namespace) -> int:
    from hpc_train.launch.status import status_command

    return status_command(options)


def _logs(options: argparse.Namespace) -> int:
    from hpc_train.launch.logs import logs_command

    return logs_command(options)


def _cancel(options: argparse.Namespace) -> int:
    from hpc_train.launch.cancel import cancel_command

    return cancel_command(options)


def _shell(options: argparse.Namespace) -> int:
    from hpc_train.launch.shell import shell_command

    return shell_command(options)


def _stacks(options: argparse.Namespace) -> int:
    from hpc_train.health.stacks_command import stacks_command

    return stacks_command(options)


def _doctor(options: argparse.Namespace) -> int:
    from hpc_train.health.doctor.command import doctor_command

    return doctor_command(options)


def _ckpt(options: argparse.Namespace) -> int:
    from hpc_train.checkpoint.command import bound_of, run_ckpt_command
    from hpc_train.checkpoint.stores.bounded import bounded
    from hpc_train.checkpoint.stores.location import locate

    arguments = {"ls": "run", "verify": "path", "convert": "source", "prune": "run"}
    argument = arguments.get(options.ckpt_command)
    if argument is not None:
        named = getattr(options, argument)
        place = locate(named if "/" in named else options.runs_dir)
        bounded(place, lambda: _find_run(options, argument), f"looking for {named}", bound_of(options))
    return run_ckpt_command(options)


def _report(options: argparse.Namespace) -> int:
    from hpc_train.observe.report import report_command

    _find_run(options, "run")
    return report_command(options)


def _trace(options: argparse.Namespace) -> int:
    from hpc_train.observe.trace_command import trace_command

    _find_run(options, "run")
    return trace_command(options)


def _find_run(options: argparse.Namespace, argument: str) -> None:
    """Put its folder in the place of a run that an argument gives by job id or name."""
    from pathlib import Path

    from hpc_train.launch.find_run import folder_of_run

    setattr(options, argument, folder_of_run(getattr(options, argument), Path(options.runs_dir)))


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "data": _data,
    "run": _run,
    "submit": _submit,
    "exec": _exec,
    "plan": _plan,
    "profile": _profile,
    "status": _status,
    "logs": _logs,
    "cancel": _cancel,
    "shell": _shell,
    "stacks": _stacks,
    "doctor": _doctor,
    "ckpt": _ckpt,
    "report": _report,
    "trace": _trace,
}

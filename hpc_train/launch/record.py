"""What a start leaves in the run folder: log lines, the environment that mattered, the outcome."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train import log
from hpc_train.config import LaunchConfig
from hpc_train.errors import ExitCode
from hpc_train.launch.first_failure import (
    first_failure,
    keep_failure,
    left_with_reason,
    was_ended,
    who_was_interrupted,
)
from hpc_train.launch.launcher_words import SLURM_ENDED_IT
from hpc_train.launch.ranks import RanksEnd
from hpc_train.launch.saved_last import last_saved
from hpc_train.log import FailureKind, kind_of, origin_of
from hpc_train.plan.run_files import OUTCOME_FILE, read_json, write_atomically

JOB_LOG = "job.log"

_RECORDED = re.compile(
    r"(SLURM|SLURMD|HPC_TRAIN|NCCL|GLOO|UCX|FI|OMPI|PMIX|PRTE|PMI|MPICH|MPI4PY|TORCH|TORCH_NCCL|CUDA|OMP|MKL|"
    r"PYTHON|CONDA|MODULE|LMOD)[A-Z0-9_]*|LOADEDMODULES|_LMFILES_|PATH|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|HOSTNAME|"
    r"TMPDIR|SCRATCH"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|KEY|AUTH|COOKIE", re.IGNORECASE)


class JobLog:
    """The driver's own lines: on its output and in logs/job.log, once where both are the same file."""

    def __init__(self, run_dir: Path, *, quiet: bool = False) -> None:
        """quiet: into the file only."""
        self._quiet = quiet
        path = run_dir / "logs" / JOB_LOG
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        ours, theirs = os.fstat(self._descriptor), os.fstat(1)
        self._is_output = (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)

    def say(self, text: str) -> None:
        """Raises nothing: ranks, and agents that write a checkpoint to its end, must not be ended by a full disk."""
        if not self._quiet:
            with suppress(OSError):
                log.say(f"hpc-train: {text}")
        if not self._is_output or self._quiet:
            with suppress(OSError):
                os.write(self._descriptor, f"{log.timestamp()} driver | {text}\n".encode(errors="replace"))


def banner(attempt: int, job_id: str | None) -> str:
    job = f"job {job_id}" if job_id else "on this machine"
    return f"==== attempt {attempt}, {job}, {log.timestamp()} ===="


def write_banner(paths: list[Path], text: str) -> None:
    """Part the attempts in log files that are there already."""
    for path in paths:
        if path.exists():
            with path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


def environment_text(env: Mapping[str, str]) -> str:
    """The variables that may matter for a run, without any that look like secrets."""
    chosen = {name: value for name, value in env.items() if _RECORDED.fullmatch(name) and not _SECRET.search(name)}
    return "".join(f"{name}={json.dumps(chosen[name])}\n" for name in sorted(chosen))


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended. outcome: done, failed, interrupted (to be gone on with), stopped, or no progress."""

    outcome: str
    exit_code: int
    reason: str
    failure: dict[str, Any] | None


def decide_outcome(run_dir: Path, end: RanksEnd, *, any_code: bool = False, stop_signal: int | None = None) -> Outcome:
    """From what a rank says of its own failure, else from what a rank wrote, else from how ranks were ended.

    A run that was asked to end has not failed where its ranks were ended before they could save, and lost each other.
    It has where one of them ended by itself, as with an error's exit code or by SIGSEGV. SIGINT, whoever got it, stops
    a run as Ctrl-C does.

    stop_signal: what asks ranks to save and end. It ends a rank that is still starting; the run goes on all the same.
    any_code: the code of a failed rank is passed on even where it is none of ours, as a shell would; of a program that
    is not ours nothing is known of saves.
    """

    def newest() -> str:  # asked for behind the verdict, which it does not change
        return "" if any_code else f"; {last_saved(run_dir)}"

    if end.stopped is not None:
        return Outcome("failed", int(ExitCode.LAUNCH), end.stopped, None)
    if end.forced is not None:
        return Outcome("stopped", int(ExitCode.INTERNAL), f"{end.forced}{newest()}", None)
    recorded = log.read_failure(run_dir)
    is_swallowed = recorded is not None and kind_of(recorded) is FailureKind.OWN  # by a wrapper of launch.wrap
    written = read_json(run_dir / OUTCOME_FILE)
    if end.code == 0 and not is_swallowed:
        return _as_written(written or {})
    failure = first_failure(run_dir, end)
    if failure is not None and kind_of(failure) is FailureKind.OWN:
        return _failed(failure, any_code)
    if written is not None and "attempt" not in written and written.get("exit_code"):
        return _as_written(written)  # rank 0's: all had saved by then, whatever ended them on their way out
    if end.code == ExitCode.REQUEUE and not any_code:
        return Outcome("interrupted", int(ExitCode.REQUEUE), f"stopped by its ranks in good order{newest()}", None)
    who = who_was_interrupted(run_dir, end, failure)
    if who is not None:
        return Outcome("stopped", int(ExitCode.INTERNAL), f"{who}{newest()}", None)
    interruption = _interruption(end, stop_signal)
    is_error = left_with_reason(end) if failure is None else not was_ended(failure)
    if interruption is not None and not is_error:
        first = f" (first {origin_of(failure)}: {failure.get('message')})" if failure is not None else ""
        reason = f"{interruption}; the ranks ended before all had left in good order{first}{newest()}"
        return Outcome("interrupted", int(ExitCode.REQUEUE), reason, None)
    said = f". srun said: {' / '.join(end.said)}" if end.said else ""
    if failure is not None:
        stop = "" if interruption is None else f". It was to save and end: {interruption}"
        return _failed(failure, any_code, said if kind_of(failure) is FailureKind.FOLLOWS else stop)
    refused = next((line for line in end.said if "Unable to create step" in line), None)
    if refused is not None:
        reason = (
            f"srun started no rank: {refused}. The job does not grant what the ranks need; ask for fewer ranks (-n), "
            "or submit with more nodes, tasks or CPUs"
        )
        return Outcome("failed", int(ExitCode.LAUNCH), reason, None)
    return Outcome("failed", _own_code(end.code), _explain_code(end.code) + said + newest(), None)


def _as_written(record: Mapping[str, Any]) -> Outcome:
    """What rank 0 has left behind of a good end; nothing of a run that is done and whose saves all went well."""
    code, reason = int(record.get("exit_code", 0)), str(record.get("reason", "all ranks ended well"))
    return Outcome(str(record.get("outcome", "done")), code, reason, None)


def _failed(failure: dict[str, Any], any_code: bool, said: str = "") -> Outcome:
    code = failure.get("exit_code")
    is_fit = isinstance(code, int) and 0 < code < (256 if any_code else 128)
    exit_code = code if isinstance(code, int) and is_fit else int(ExitCode.INTERNAL)
    follows = kind_of(failure) is FailureKind.FOLLOWS
    lost = "lost another rank or its agent, and nobody saw what ended that: " if follows else ""
    return Outcome("failed", exit_code, f"{origin_of(failure)}: {lost}{failure.get('message')}{said}", failure)


def _interruption(end: RanksEnd, stop_signal: int | None) -> str | None:
    """What asked for the end of a run whose ranks did not end well."""
    if end.asked is not None:
        return end.asked
    if stop_signal is not None and end.code in (128 + stop_signal, -stop_signal):
        return f"a rank got {signal.Signals(stop_signal).name} before it could handle it"
    if stop_signal is not None and end.is_silent:
        return "mpirun ended its ranks without a word, as it does when it is told to end itself"
    return next((line for line in end.said if SLURM_ENDED_IT.search(line)), None)


def bound_by_progress(outcome: Outcome, count_stalled: Callable[[], int], config: LaunchConfig) -> Outcome:
    """The same outcome, or that the run is not to be started again, where so many starts saved nothing new.

    count_stalled: starts in a row, this one included, that found the checkpoint that is still the newest; asked for
    only where the run would be started again.
    """
    comes_back = {"interrupted": (ExitCode.REQUEUE,), "failed": (ExitCode.REQUEUE, ExitCode.INTERNAL), "never": ()}
    if outcome.exit_code not in comes_back[config.requeue] or (stalled := count_stalled()) < config.max_stalled:
        return outcome
    return no_progress(stalled, outcome.reason, outcome.failure)


def no_progress(stalled: int, last_end: str, failure: dict[str, Any] | None = None) -> Outcome:
    reason = (
        f"no checkpoint came of the last {stalled} starts of this job, so it is not started again "
        f"(launch.max_stalled). Save more often (checkpoint.every), ask for more time, or mend what ended it: "
        f"{last_end}"
    )
    return Outcome("no progress", int(ExitCode.NO_PROGRESS), reason, failure)


def write_outcome(run_dir: Path, outcome: Outcome, *, attempt: int, job_id: str | None) -> None:
    """Put on record how an attempt ended, and which failure it ended by.

    Raises nothing: where it cannot be written, as on a disk that is full, the exit code has to tell alone.
    """
    record = {
        "outcome": outcome.outcome,
        "exit_code": outcome.exit_code,
        "reason": outcome.reason,
        "attempt": attempt,
        "job_id": job_id,
        "time": log.timestamp(),
    }
    path = run_dir / OUTCOME_FILE
    try:
        write_atomically(path, json.dumps(record, indent=1) + "\n")
    except OSError as problem:
        log.try_to_say(
            f"hpc-train: warning: how the run ended could not be written to {path} ({problem.strerror or problem}); "
            f"the exit code {outcome.exit_code} is right all the same"
        )
        if (read_json(path) or {}).get("exit_code") != outcome.exit_code:
            with suppress(OSError):
                path.unlink(missing_ok=True)  # what a rank wrote there is not how it ended
    with suppress(OSError):  # a disk that is full now has room for what counts
        keep_failure(run_dir, outcome.failure)


def failure_text(failure: Mapping[str, Any]) -> str:
    """The first failure in words, with its traceback where it is not the user's to mend."""
    lost = " (it lost another rank or its agent, and nobody saw what ended that)"
    head = (
        f"first failure: {origin_of(failure)} at {failure.get('time')}, "
        "exit code "
        f"{failure.get('exit_code')}{lost if kind_of(failure) is FailureKind.FOLLOWS else ''}: {failure.get('message')}"
    )
    if failure.get("exit_code") == int(ExitCode.INTERNAL) and failure.get("traceback"):
        return f"{head}\n{str(failure['traceback']).rstrip()}"
    return head


def _own_code(code: int) -> int:
    """Codes of our table are passed on; signals and whatever else become 1."""
    return code if code in set(ExitCode) else int(ExitCode.INTERNAL)


def _explain_code(code: int) -> str:
    if code == 253:
        # cited: srun(1), exit code 253 is reserved for out of memory.
        return "srun says that a rank was killed because the node ran out of memory (code 253)"
    number = -code if code < 0 else code - 128
    if 0 < number < 65:
        return f"a rank or the launcher was ended by signal {number}, and no rank recorded an error"
    return f"the launcher ended with code {code}, and no rank recorded an error; see the logs folder"

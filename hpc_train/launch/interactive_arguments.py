"""The arguments of what is typed beside a live run. Only argparse is imported here."""

from __future__ import annotations

import argparse
from typing import Any

from hpc_train.arguments import add_run, filled, natural, seconds
from hpc_train.launch.slurm_flags import add_slurm_flags

_SHELL_EXAMPLES = """\
examples:
  hpc-train shell -N 2 --ntasks-per-node=8 -t 1:00:00 -p debug
  hpc-train shell config.yaml -N 2                    loads launch.modules of the configuration as well
  hpc-train shell -n 4 --command 'hpc-train run config.yaml'
  echo 'hpc-train run config.yaml' | hpc-train shell -n 4
  hpc-train shell -N 2 -- --quiet --immediate=60      whatever follows `--` goes to salloc as it is

In the shell, `hpc-train run CONFIG` starts ranks on what was granted, again and again. Each run gets a folder of its
own, and `--run-dir DIR` goes on with an earlier one. -q is --qos; salloc's own --quiet has no short form here.
"""

_STACKS_EXAMPLES = """\
examples:
  hpc-train stacks 123                      who does not answer, and what the others wait for
  hpc-train stacks runs/tiny/123 --rank 5 --frames 0
  hpc-train stacks 123 --json               all threads of all ranks

The ranks go on as before: each writes its own stacks when asked. A rank that cannot answer is named with the state
of its process and, where py-spy is installed, looked at from outside.
"""


def add_interactive_parsers(commands: Any) -> None:
    """Add the commands for people at a terminal."""
    _add_shell(commands)
    _add_stacks(commands)


def _add_shell(commands: Any) -> None:
    parser = commands.add_parser(
        "shell",
        help="salloc with the environment ready",
        description="Ask Slurm for nodes and start a shell there to run, look, mend and run again.",
        epilog=_SHELL_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "overrides",
        type=filled,
        metavar="CONFIG [key=value]",
        nargs="*",
        help="check this configuration and load its launch.modules",
    )
    parser.add_argument(
        "--command",
        dest="shell_command",
        type=filled,
        metavar="COMMAND",
        help="run this line of bash instead of a shell, and end with its exit code",
    )
    add_slurm_flags(parser, tool="salloc", without=("array", "requeue", "no-requeue"))


def _add_stacks(commands: Any) -> None:
    parser = commands.add_parser(
        "stacks",
        help="Python stacks of all ranks of a live run",
        description="Show where every rank of a live run is, equal ones together, without disturbing them.",
        epilog=_STACKS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_run(parser)
    parser.add_argument("--rank", type=natural, metavar="N", help="only this rank")
    parser.add_argument(
        "--frames",
        type=natural,
        default=12,
        metavar="COUNT",
        help="innermost frames of each stack (default: 12; 0: all)",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=3.0, metavar="SECONDS", help="how long a rank may take (default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")

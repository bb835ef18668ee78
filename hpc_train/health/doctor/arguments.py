"""The arguments of doctor. Only argparse is imported here."""

from __future__ import annotations

import argparse
from typing import Any

from hpc_train.arguments import filled
from hpc_train.launch.slurm_flags import FLAGS, NO_VALUE

_EXAMPLES = """\
examples:
  hpc-train doctor                         this machine; on a login node also Slurm, without starting anything
  hpc-train doctor -N 2 -p gpu --gpus-per-node=8
                                           in a small job of its own: two nodes, with a trial of MPI between them
  salloc -N 16 hpc-train doctor            all nodes of an allocation
  hpc-train doctor config.yaml --json      with the settings of a run, for a program to read
  hpc-train doctor --watch-errors 30       which error counters of the network grow, while a job runs
  sudo hpc-train doctor --admin-dump /opt/hpc/fabric.yaml
                                           the InfiniBand fabric, once for all users (fabric.source)

Exit code 3 when a finding would stop a run, else 0.
"""
_JOB_FLAGS = (
    "nodes", "gpus-per-node", "time", "partition", "account", "qos", "constraint", "nodelist", "exclude",
    "reservation", "exclusive",
)  # fmt: skip


def add_doctor_parser(commands: Any) -> None:
    """Add the command `doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="what works here, and how to mend what does not",
        description="Say what works here: Slurm, MPI, network cards, GPUs, interfaces, limits, storage, modules, HDFS.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "config", type=filled, metavar="CONFIG", nargs="?", help="a YAML file or recipe whose settings are used"
    )
    parser.add_argument(
        "overrides", type=filled, metavar="key=value", nargs="*", help="changes, for example launch.mpi=pmi2"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--verbose", action="store_true", help="also what is not configured")
    trial = parser.add_mutually_exclusive_group()
    trial.add_argument("--trial", action="store_true", help="on a login node: try MPI in a small job of its own (-N 2)")
    trial.add_argument("--no-trial", action="store_true", help="start no MPI tasks")
    parser.add_argument("--mpi", type=filled, metavar="PLUGIN", help="try this --mpi of srun first")
    parser.add_argument(
        "--runs-dir",
        type=filled,
        metavar="DIR",
        help="where run folders are (default: the configuration's, or runs)",
    )
    parser.add_argument(
        "--hdfs", type=filled, metavar="URL", help="an HDFS to reach (default: Hadoop's own configuration)"
    )
    parser.add_argument(
        "--watch-errors",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="read the network's error counters twice, and say which grow",
    )
    dump = parser.add_argument_group("the fabric, for an administrator")
    dump.add_argument(
        "--admin-dump",
        type=filled,
        metavar="FILE",
        help="look at nothing but the InfiniBand fabric, and write it for all users; needs root",
    )
    dump.add_argument(
        "--cards", type=filled, metavar="LIST", help="the cards that are rails, such as mlx5_[0-3,6-9] (default: all)"
    )
    group = parser.add_argument_group("a job of its own (further flags of salloc follow behind `--`)")
    for flag in FLAGS:
        if flag.long in _JOB_FLAGS:
            names = [flag.short, f"--{flag.long}"] if flag.short else [f"--{flag.long}"]
            value: dict[str, Any] = {"nargs": "?", "const": NO_VALUE} if flag.optional else {}
            group.add_argument(
                *names,
                dest=f"slurm_{flag.key}",
                metavar=flag.metavar,
                help=flag.help,
                type=filled,
                **value,
            )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    # assumed: nobody waits longer at a terminal; srun's own limits would end it.
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds up to 3600")
    return value

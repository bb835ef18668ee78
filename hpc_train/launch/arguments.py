"""The arguments of run, submit, exec, status, logs and cancel. Only argparse is imported here."""

from __future__ import annotations

import argparse
from typing import Any

from hpc_train.arguments import add_run, filled, natural, positive, seconds
from hpc_train.launch.slurm_flags import add_slurm_flags

_RUN_EXAMPLES = """\
examples:
  hpc-train run config.yaml -n 2                   on a laptop: starts mpirun
  salloc -N 2 --ntasks-per-node=8 hpc-train run config.yaml
                                                   in a job: starts srun with what the job was granted
  hpc-train run config.yaml train.steps=50 model.num_layers=8 --print-config
  hpc-train run config.yaml --run-dir runs/tiny/2026-11-29_22-10-03
                                                   goes on with an earlier run
  hpc-train run config.yaml -n 4 --debug-rank 2    pdb on rank 2; the others wait for it
"""

_SUBMIT_EXAMPLES = """\
examples:
  hpc-train submit config.yaml -N 4 --ntasks-per-node=8 -t 4:00:00
  hpc-train submit config.yaml -N 4 --gpus-per-node=8 --exclusive --dry-run
  hpc-train submit config.yaml -n 16 --chain 3     three jobs, one after another, in one run folder
  hpc-train submit config.yaml -n 16 --via submitit
                                                   submitit is in the job, around the same script
  hpc-train submit config.yaml -n 16 -- --nice=100 --hint=nomultithread
                                                   whatever follows `--` goes to sbatch as it is
"""

_EXEC_EXAMPLES = """\
examples:
  hpc-train exec -n 4 -- python my_script.py --lr 0.1
  salloc -N 2 --ntasks-per-node=4 hpc-train exec -- python my_script.py

PROGRAM finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, GROUP_RANK, MASTER_ADDR and
MASTER_PORT, so torch.distributed.init_process_group("gloo") works without arguments. It may use mpi4py as well.
"""


def add_launch_parsers(commands: Any) -> None:
    """Add the commands that start, watch and stop runs."""
    _add_run(commands)
    _add_submit(commands)
    _add_exec(commands)
    _add_status(commands)
    _add_logs(commands)
    _add_cancel(commands)


def _parser(commands: Any, name: str, summary: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=filled, metavar="CONFIG", help="a YAML file, or the name of a recipe")
    parser.add_argument(
        "overrides", type=filled, metavar="key=value", nargs="*", help="changes, for example train.steps=50"
    )


def _add_counts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--ntasks", dest="ranks", type=positive, metavar="RANKS", help="number of ranks in all")
    parser.add_argument(
        "--ntasks-per-node", dest="ranks_per_node", type=positive, metavar="RANKS", help="ranks on each node"
    )
    parser.add_argument(
        "--mpi", type=filled, metavar="PLUGIN", help="srun's --mpi (default: what fits the MPI library)"
    )


def _add_run(commands: Any) -> None:
    parser = _parser(
        commands,
        "run",
        "train: on this machine, in a batch script, or as one rank of a step",
        "Train. On a laptop this starts mpirun; in a batch script or salloc shell it starts srun; inside a "
        "step\n"
        "it is one rank. It says which it found and why.",
        _RUN_EXAMPLES,
    )
    _add_configuration(parser)
    _add_counts(parser)
    parser.add_argument("--run-dir", type=filled, metavar="DIR", help="run folder; an earlier one is gone on with")
    parser.add_argument(
        "-t",
        "--time",
        type=filled,
        metavar="LIMIT",
        help="save and end before this time is over, written as for sbatch: 30, 1:30:00",
    )
    parser.add_argument(
        "--debug-rank", type=natural, metavar="N", help="a debugger on rank N, on this terminal; the others wait"
    )
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration and stop")


def _add_submit(commands: Any) -> None:
    parser = _parser(
        commands,
        "submit",
        "write a batch script and give it to sbatch",
        "Check the configuration, write a batch script that holds all it needs, and give it to sbatch.",
        _SUBMIT_EXAMPLES,
    )
    _add_configuration(parser)
    parser.add_argument("--run-dir", type=filled, metavar="DIR", help="run folder (default: RUNS/NAME/JOB)")
    parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    parser.add_argument("--parsable", action="store_true", help="print the job id alone")
    parser.add_argument("--follow", action="store_true", help="show the log until the run ends")
    parser.add_argument("--chain", type=positive, default=1, metavar="K", help="submit K jobs, one after another")
    parser.add_argument(
        "--via", choices=("sbatch", "submitit"), default="sbatch", help="what submits (default: sbatch)"
    )
    parser.add_argument(
        "--mpi", type=filled, metavar="PLUGIN", help="srun's --mpi (default: what fits the MPI library)"
    )
    add_slurm_flags(parser)


def _add_exec(commands: Any) -> None:
    parser = _parser(
        commands,
        "exec",
        "run any program on the ranks, with torchrun's variables",
        "Run any program on the ranks: `hpc-train exec [options] -- PROGRAM ARGUMENTS`.",
        _EXEC_EXAMPLES,
    )
    _add_counts(parser)
    parser.add_argument(
        "--run-dir", type=filled, metavar="DIR", help="folder for logs (default: runs/exec/JOB or TIME)"
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="limit for the ranks to meet (default: 600)",
    )
    parser.add_argument(
        "--interface", type=filled, metavar="NAME", help="network interface of rank 0, as in NCCL_SOCKET_IFNAME"
    )
    parser.add_argument(
        "--fabric", type=filled, metavar="FILE", help="where nodes stand in the network (default: what Slurm tells)"
    )


def _add_status(commands: Any) -> None:
    parser = _parser(
        commands,
        "status",
        "what runs are doing",
        "Tell what a run is doing, or, without RUN, what all runs in the runs folder are doing.",
    )
    add_run(parser, nargs="?")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_logs(commands: Any) -> None:
    parser = _parser(
        commands,
        "logs",
        "show or follow the logs of a run",
        "Show the logs of a run: the job's and the nodes'.",
    )
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--rank", type=natural, metavar="N", help="only the lines of this rank")


def _add_cancel(commands: Any) -> None:
    parser = _parser(commands, "cancel", "stop a run", "Stop a run: scancel for a job, TERM for a driver here.")
    add_run(parser)

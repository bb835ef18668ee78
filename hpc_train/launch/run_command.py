"""`hpc-train run`: find the situation, then drive, be one rank, or refuse."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

from hpc_train.cluster.environment import process_env
from hpc_train.cluster.process import own_process
from hpc_train.cluster.situation import Found, Situation, find_situation
from hpc_train.errors import ConfigError, LaunchError

BeARank = Callable[[str], int]
"""Given the run folder, be one rank and return its exit code."""


def run_command(options: Namespace, be_a_rank: BeARank) -> int:
    """Carry out `run`."""
    if options.print_config:
        from hpc_train.config_read import dump_yaml, load_config

        print(dump_yaml(load_config(options.config, options.overrides)), end="")
        return 0
    env = process_env()
    found = find_situation(env, own_process())
    if found.situation in (Situation.STEP_TASK, Situation.MPI_TASK):
        return be_a_rank(rank_folder(options, env, found))
    if found.situation is Situation.ELASTIC:
        raise LaunchError(
            f"hpc-train run does not start under torchrun ({found.reason}). Start `hpc-train run` by "
            "itself, which "
            'starts the ranks; or keep torchrun and your own script, and call hpc_train.bootstrap(source="env") in it'
        )
    return _drive(options, env, found)


def rank_folder(options: Namespace, env: Mapping[str, str], found: Found) -> str:
    """The run folder that the driver told this rank, or a refusal where no driver started it."""
    from hpc_train.launch.run_folder import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE

    if env.get(ATTEMPT_VARIABLE) and env.get(RUN_DIR_VARIABLE) and not options.overrides:
        return env[RUN_DIR_VARIABLE]
    error = LaunchError(
        f"{found.reason}, but no `hpc-train run` started it, so there is no plan of who is which rank. Write "
        f"`hpc-train run {options.config}` into the batch script or type it in the salloc shell, without srun or "
        "mpirun before it: it makes the plan and starts the ranks itself"
    )
    error.reporter = 0
    raise error


def _time_limit(text: str | None) -> float | None:
    """Seconds, or None where none is given; unlike Slurm's, a limit of `0:20` is 20 seconds."""
    from hpc_train.cluster.limits import Unknown, parse_time_limit

    if text is None:
        return None
    limit = parse_time_limit(text, whole_minutes=False)
    if limit is None:
        raise ConfigError(f"--time {text!r} is no limit, by Slurm's rules; leave --time out, or give a time above 0")
    if isinstance(limit, Unknown):
        raise ConfigError(
            f"--time {text!r} is no time limit; write minutes (90), minutes:seconds, hours:minutes:seconds or "
            "days-hours:minutes:seconds"
        )
    return limit


def _drive(options: Namespace, env: Mapping[str, str], found: Found) -> int:
    from hpc_train.config_read import load_config
    from hpc_train.launch.driver import RunRequest, drive

    request = RunRequest(
        config=load_config(options.config, options.overrides),
        run_dir=Path(options.run_dir) if options.run_dir else None,
        ranks=options.ranks,
        ranks_per_node=options.ranks_per_node,
        mpi=options.mpi,
        time_limit_s=_time_limit(options.time),
        debug_rank=options.debug_rank,
    )
    return drive(request, env, found)

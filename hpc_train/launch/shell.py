"""`hpc-train shell`: salloc with everything ready to type `hpc-train run`, or to run a script's lines."""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping

from hpc_train.cluster.environment import process_env, salloc_defaults
from hpc_train.errors import LaunchError
from hpc_train.launch.queue import job_is_live
from hpc_train.launch.salloc import run_salloc
from hpc_train.launch.slurm_flags import given_flags


def shell_command(options: Namespace) -> int:
    """Carry out `shell`: the exit code is that of the shell in the allocation.

    Raises:
        ConfigError: the configuration does not load.
        LaunchError: there is no salloc, it grants nothing, or this is inside an allocation.
    """
    env = process_env()
    refuse_inside_a_job(env)
    salloc = shutil.which("salloc", path=env.get("PATH"))
    if salloc is None:
        raise LaunchError(
            "salloc is not on PATH: this machine is no login node of a Slurm cluster, or its module is not loaded. On "
            "a machine without Slurm type `hpc-train run CONFIG -n RANKS`"
        )
    modules: tuple[str, ...] = ()
    if options.overrides:
        from hpc_train.config_read import load_config

        modules = load_config(options.overrides[0], options.overrides[1:]).launch.modules
    flags = {**salloc_defaults(env), **given_flags(options)}
    return run_salloc(
        salloc, salloc_options(flags, options.verbatim or []), start_argv(modules, options.shell_command), env
    )


def refuse_inside_a_job(env: Mapping[str, str]) -> None:
    """An allocation within an allocation is hardly meant; a job that has ended leaves only its variables behind."""
    job_id = env.get("SLURM_JOB_ID")
    if job_id and job_is_live(job_id) is not False:
        raise LaunchError(
            f"this is inside job {job_id} already: type `hpc-train run CONFIG` here, as often as you like. For other "
            "nodes leave this job first (`exit`)"
        )


def salloc_options(flags: Mapping[str, str], verbatim: list[str]) -> list[str]:
    """salloc's flags, before the command that it is to start."""
    return [*(f"--{long}={value}" if value else f"--{long}" for long, value in flags.items()), *verbatim]


def start_argv(modules: tuple[str, ...], command: str | None) -> list[str]:
    argv = [sys.executable, "-m", "hpc_train.launch.shell_start", *(f"--module={name}" for name in modules)]
    return argv if command is None else [*argv, f"--command={command}"]

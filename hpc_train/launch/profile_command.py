"""`hpc-train profile`: starts ranks that measure this machine for batch planning."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from hpc_train.cluster.environment import process_env
from hpc_train.cluster.process import own_process
from hpc_train.cluster.situation import find_situation
from hpc_train.config_read import load_config
from hpc_train.errors import ConfigError
from hpc_train.launch.driver import find_job
from hpc_train.launch.exec import exec_command
from hpc_train.plan.out_file import check_out


def profile_command(options: Namespace) -> int:
    """Carry out `profile`: rank 0 writes the file."""
    config = load_config(options.config, options.overrides)
    out = Path(options.out).absolute()
    check_out(out, "--out", inputs=[options.config])
    env = process_env()
    ranks, per_node, least = options.ranks, options.ranks_per_node, 2 * config.parallel.tp
    if find_job(env, find_situation(env, own_process())) is None:
        ranks = ranks or per_node or least
    if ranks is not None and ranks < least:
        raise ConfigError(
            f"{ranks} ranks with parallel.tp={config.parallel.tp} are one hdp rank, and a ring's transfers need two. "
            f"Start {least} ranks or more"
        )
    program = [sys.executable, "-m", "hpc_train.train.profile_ranks", options.config, *options.overrides]
    program += ["--out", str(out), "--repeats", str(options.repeats)]
    return exec_command(
        Namespace(
            ranks=ranks,
            ranks_per_node=per_node,
            mpi=options.mpi or config.launch.mpi,
            run_dir=None,
            timeout=config.launch.timeout_s,
            interface=config.launch.interface,
            fabric=config.fabric.source,
            verbatim=program,
        )
    )

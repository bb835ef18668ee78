"""From a start of ranks to one of which a rank is debugged: the terminal, and time to think for the others."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import replace

from hpc_train.cluster.debug_channel import DEBUG_VARIABLE, DebugRequest
from hpc_train.cluster.environment import END_TIME_VARIABLE, RENDEZVOUS_VARIABLE
from hpc_train.errors import ConfigError, LaunchError
from hpc_train.launch.debug_terminal import DebugTerminal
from hpc_train.launch.ranks import RanksToStart, SrunLauncher
from hpc_train.plan.run import Plan

PATIENCE_S = 86400
"""A day: how long ranks wait for one that somebody thinks about."""


def for_debugging(start: RanksToStart, plan: Plan, rank: int, host: str) -> RanksToStart:
    """The same start with a terminal for one rank, on the address of this host that the rank's node reaches.

    Raises:
        LaunchError: this host cannot listen, or the way to the node is not known.
    """
    node = next(planned.node for planned in plan.ranks if planned.rank == rank)
    terminal = DebugTerminal(rank, _address_towards(node, host))
    launcher = start.launcher
    if isinstance(launcher, SrunLauncher):
        launcher = replace(launcher, wait_s=0)
    return replace(start, env=debug_environment(start.env, terminal.request), launcher=launcher, terminal=terminal)


def check_debug_rank(rank: int | None, world_size: int) -> None:
    """Refuse a rank that there will not be."""
    if rank is not None and not 0 <= rank < world_size:
        raise ConfigError(f"--debug-rank {rank} is not among the {world_size} ranks, which are 0 to {world_size - 1}")


def debug_environment(env: Mapping[str, str], request: DebugRequest) -> dict[str, str]:
    """The ranks' environment with the way to the terminal and with time to think.

    The end of the job's time is left out: a step that somebody thought about for long would count as a long step.
    """
    meeting = {**json.loads(env[RENDEZVOUS_VARIABLE]), "timeout_s": float(PATIENCE_S)}
    return {
        **{name: value for name, value in env.items() if name != END_TIME_VARIABLE},
        RENDEZVOUS_VARIABLE: json.dumps(meeting),
        DEBUG_VARIABLE: request.to_text(),
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(PATIENCE_S),
    }


def _address_towards(node: str, host: str) -> str:
    """This host's address on the way to a node, as the kernel would choose it; nothing is sent."""
    if node == host:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((node, 9))
        except OSError as problem:
            raise LaunchError(f"the way from {host} to the rank's node {node} is not known: {problem}") from problem
        return str(probe.getsockname()[0])

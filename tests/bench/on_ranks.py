"""Benchmarks on ranks: processes of this machine, or, under torchrun's variables, the ranks that a launcher started."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.ranks import TestRank, run_ranks

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 1800) -> list[Any] | None:
    """What the function returns on each rank; None on launched ranks other than 0.

    world_size: of processes here. Launched ranks are as many as were started, on whatever hosts, with gloo; so
    `hpc-train exec -n 2 -- python -m tests.bench...` measures the network between nodes.
    """
    if not all(name in os.environ for name in _NAMES):
        return run_ranks(function, world_size, *args, timeout_s=timeout_s)
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    me = TestRank(dist.get_rank(), dist.get_world_size(), "gloo", timedelta(seconds=timeout_s))
    own = function(me, *args)
    found: list[Any] | None = [None] * me.world_size if me.rank == 0 else None
    dist.gather_object(own, found)
    return found

"""A World for functions under `run_ranks`, and for a process alone."""

from __future__ import annotations

import torch

from hpc_train.comm.collectives import Group, world_group
from hpc_train.comm.control import SingleControl, TorchControl
from hpc_train.comm.world import World
from tests.ranks import TestRank


def make_world(me: TestRank) -> World:
    """The World of a rank that `run_ranks` started: one node, gloo, JSON over the process group."""
    control = TorchControl(me.rank, me.world_size, "cpu") if me.world_size > 1 else SingleControl()
    return World(
        rank=me.rank,
        world_size=me.world_size,
        local_rank=me.rank,
        local_world_size=me.world_size,
        node_rank=0,
        num_nodes=1,
        node="n1",
        device=torch.device("cpu"),
        backend="gloo",
        control=control,
        mpi=None,
        source="env",
    )


def single_world() -> World:
    return make_world(TestRank(0, 1, None, None))  # type: ignore[arg-type]


def make_group(me: TestRank) -> Group:
    return world_group(me.world_size, me.rank, "gloo")

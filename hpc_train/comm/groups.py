"""The groups of ranks along the axes of a mesh: each rank makes those that it belongs to, in one order for all.

1. all ranks compare the plan's hash, once
2. kind by kind in the plan's order: this rank and its peers meet, nobody else waits
   nccl: every group of the kind is split off the group of all ranks at once
   gloo: the members exchange addresses through one value of the store and connect
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpc_train.cluster.environment import process_env
from hpc_train.cluster.gloo_interface import told_interfaces
from hpc_train.comm import torch_groups
from hpc_train.comm.collectives import Group, world_group
from hpc_train.comm.world import World
from hpc_train.errors import LaunchError
from hpc_train.plan.groups import COMMON_KINDS, WORLD, GroupKind, GroupPlan
from hpc_train.plan.mesh import AXES, Mesh
from hpc_train.record import NOT_RECORDED, Recorder

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Groups:
    """This rank's group of each kind that has more than one rank.

    world: all ranks. handles: what was made for it in torch, each once.
    """

    plan: GroupPlan
    rank: int
    world: Group
    device_type: str
    by_name: Mapping[str, Group]
    handles: tuple[dist.ProcessGroup, ...] = ()

    @property
    def recorder(self) -> Recorder:
        """What times their communication, and this rank's other work."""
        return self.world.recorder

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    @property
    def coords(self) -> dict[str, int]:
        return self.mesh.coords(self.rank)

    def along(self, name: str) -> Group:
        """The group of an axis or another kind of the plan; a group of this rank alone where it has no peers.

        Raises:
            ValueError: the plan has no such kind.
        """
        if name == WORLD:
            return self.world
        self.plan.kind(name)
        return self.by_name.get(name) or Group((self.rank,), 0, None, self.world.backend, name, self.recorder)

    def close(self) -> None:
        """Leave these groups and keep the group of all ranks, so that others can be made. All ranks call it."""
        for handle in self.handles:
            dist.destroy_process_group(handle)

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """These groups as torch's DeviceMesh, for DTensor and FSDP; makes no group of more than one rank.

        Collective over all ranks where an axis has degree 1: torch wants a group of one rank there.

        Args:
            axes: outermost first, with at least those of degree above 1; left out: the axes of degree above 1, and dp.

        Raises:
            ValueError: an axis above degree 1 is left out, or one is not of the mesh.
        """
        from torch.distributed.device_mesh import DeviceMesh

        chosen = axes or tuple(axis for axis in AXES if axis == "dp" or self.mesh.axes[axis] > 1)
        wanted = [axis for axis in AXES if axis in chosen]
        left_out = [axis for axis in AXES if axis not in chosen and self.mesh.axes[axis] > 1]
        if list(chosen) != wanted or left_out:
            raise ValueError(
                f"a device mesh of {', '.join(chosen)} was asked for; name axes of the mesh in the order "
                f"{', '.join(AXES)}, all of degree above 1 among them ({self.mesh.describe()})"
            )
        handles = [self.along(axis).handle or torch_groups.single_rank_group(axis, self.rank, axis) for axis in wanted]
        shape = [self.mesh.axes[axis] for axis in wanted]
        ranks = torch.arange(self.mesh.world_size, dtype=torch.int).view(shape)
        return DeviceMesh.from_group(handles, self.device_type, mesh=ranks, mesh_dim_names=tuple(wanted))


def build_groups(world: World, plan: GroupPlan | None = None, recorder: Recorder = NOT_RECORDED) -> Groups:
    """Make this rank's groups. Collective over all ranks, but each takes part in its own groups only.

    No barrier follows a group, and kinds of the same ranks share one: creation costs a rank what its own groups cost,
    however many there are in all. A kind in which this rank has no peers costs nothing.

    Args:
        plan: left out, the axes of the layout that bootstrap was given, with HDP and MODEL.
        recorder: What times the groups' communication.

    Raises:
        ValueError: no plan is given, and bootstrap was given no layout.
        LaunchError: the ranks hold different plans, or the plan is for another number of ranks.
        CollectiveError: peers did not come within the time limit of the group of all ranks, with their ranks.
    """
    if plan is None:
        if world.plan is None:
            raise ValueError(
                "of which mesh? Give bootstrap a layout=Layout(tp=..., pp=...), or build_groups a GroupPlan"
            )
        plan = GroupPlan(world.plan.mesh, COMMON_KINDS)
    prefix = _agree_on_plan(world, plan)
    whole = world_group(world.world_size, world.rank, world.backend, recorder)
    made: dict[str, Group] = {}
    sources: dict[str, Group] = {WORLD: whole}
    handles = []
    make = _maker(world, plan, prefix) if plan.made else None
    for kind in plan.made:
        assert make is not None
        ranks = plan.group_of(world.rank, kind.name)
        handle = make(kind, ranks)
        handles.append(handle)
        if len(ranks) > 1:
            sources[kind.name] = Group(ranks, ranks.index(world.rank), handle, world.backend, kind.name, recorder)
    for kind in plan.kinds:
        source = sources.get(plan.same_as(kind.name))
        if source is not None and plan.group_size(kind.name) > 1:
            made[kind.name] = replace(source, name=kind.name)
    return Groups(plan, world.rank, whole, world.device.type, made, tuple(handles))


def _agree_on_plan(world: World, plan: GroupPlan) -> str:
    """Compare the plan over all ranks, and agree on a prefix under which no group was made before."""
    limit_s = torch_groups.world_timeout().total_seconds() if world.world_size > 1 else None
    compared = world.control.compare(plan.hash, note=secrets.token_hex(4), timeout_s=limit_s)
    problem = ""
    if compared.num_different:
        problem = (
            f"{compared.num_different} of {world.world_size} ranks would make other groups than rank 0, the first of "
            f"them rank {compared.first_different} (here: {plan.mesh.describe()}, "
            f"{', '.join(kind.name for kind in plan.kinds)}). Give build_groups the same plan everywhere."
        )
    elif plan.mesh.world_size != world.world_size:
        problem = (
            f"the groups are planned for a mesh of {plan.mesh.describe()} = {plan.mesh.world_size} ranks, but there "
            f"are {world.world_size}. Start {plan.mesh.world_size} ranks, or change a degree."
        )
    if problem:
        error = LaunchError(problem)
        error.reporter = 0
        raise error
    return f"hpc_train/{compared.note}"


def _maker(world: World, plan: GroupPlan, prefix: str) -> Callable[[GroupKind, tuple[int, ...]], dist.ProcessGroup]:
    """What makes this rank's group of a kind, by backend."""
    if world.device.type == "cuda" and torch_groups.can_split():
        return lambda kind, ranks: _split(plan, kind)
    store = distributed_c10d._get_default_store()
    gloo = None
    if world.backend == "gloo" and torch_groups.GlooGroups.is_possible():
        gloo = torch_groups.GlooGroups(store, told_interfaces(process_env()))

    def make(kind: GroupKind, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        name = f"{prefix}/{kind.name}/{ranks[0]}"
        if len(ranks) == 1:
            # torch names later groups of the user's by how many a rank has, so all must have as many.
            return torch_groups.single_rank_group(name, world.rank, kind.name)
        if gloo is not None:
            return gloo.make(ranks, world.rank, name, kind.name)
        return torch_groups.plain_group(ranks, world.rank, store, name, kind.name)

    return make


def _split(plan: GroupPlan, kind: GroupKind) -> dist.ProcessGroup:
    """All groups of one kind by one split of the group of all ranks; a rank that is in none is listed alone."""
    alone = [[int(rank)] for rank in (plan.group_index(kind.name) < 0).nonzero()[0]]
    return torch_groups.split_world(plan.groups(kind.name).tolist() + alone, kind.name)

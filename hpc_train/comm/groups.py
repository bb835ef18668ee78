"""The groups of ranks along the axes of a mesh: each rank makes those that it belongs to, in one order for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from hpc_train.comm.collectives import Group, world_group
from hpc_train.comm.world import World
from hpc_train.plan.mesh import AXES, Mesh

BACKWARD = "pp_backward"
"""The pipeline's ranks once more: gradients travel apart from activations."""
TIED = "tied"
"""First and last stage of a pipeline, which hold a copy each of tied embeddings."""


@dataclass(frozen=True)
class Groups:
    """One group for each axis that has more than one rank, and what is asked for besides. `world`: all ranks."""

    mesh: Mesh
    rank: int
    world: Group
    by_name: Mapping[str, Group]

    @property
    def coords(self) -> dict[str, int]:
        return self.mesh.coords(self.rank)

    def along(self, name: str) -> Group:
        """The group of an axis; a group of this rank alone where the axis has degree 1.

        Raises:
            ValueError: no such axis.
        """
        if name in self.by_name:
            return self.by_name[name]
        if name not in (*AXES, TIED, BACKWARD):
            raise ValueError(f"{name!r} is no axis of the mesh; axes are {', '.join(AXES)}")
        if name == TIED or getattr(self.mesh, name.removesuffix("_backward")) == 1:
            return Group((self.rank,), 0, None, self.world.backend)
        raise ValueError(
            f"the group along {name} was not made; set parallel.{name}={getattr(self.mesh, name)} at start"
        )


def build_groups(world: World, mesh: Mesh, *, with_tied: bool = False) -> Groups:
    """Make this rank's groups. Collective over all ranks, but each takes part in its own groups only.

    The order is that of the axes, inner to outer, for all ranks alike, and no barrier follows a group: creation costs a
    rank what its own groups cost, however many there are in all.
    """
    whole = world_group(world.world_size, world.rank, world.backend)
    members = {axis: mesh.group_of(world.rank, axis) for axis in reversed(AXES)}
    members[BACKWARD] = members["pp"]
    if with_tied and mesh.pp > 1:
        ends = (members["pp"][0], members["pp"][-1])
        members[TIED] = ends if world.rank in ends else (world.rank,)
    made = {}
    for name, ranks in members.items():
        if len(ranks) == world.world_size and name != BACKWARD:
            made[name] = whole
        elif len(ranks) > 1:
            made[name] = Group(ranks, ranks.index(world.rank), _new_group(ranks, name), world.backend)
        elif name == TIED:
            # torch makes a group's name of its ranks and of how many groups this rank has, so all must have as many.
            _new_group(ranks, name)
    return Groups(mesh, world.rank, whole, made)


def _new_group(ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
    return dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)

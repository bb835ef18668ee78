"""Where the groups of each axis live: how high their transfers have to climb in the fabric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_train.cluster.fabric import TIERS, Fabric
from hpc_train.plan.mesh import AXES, Mesh
from hpc_train.plan.traffic import route, transfers

if TYPE_CHECKING:
    from hpc_train.plan.axis_bytes import AxisTraffic
    from hpc_train.plan.placement import Placement

BEYOND_NODE = "network"
"""Where a group lives that leaves its node, as long as no topology is known."""


@dataclass(frozen=True)
class GroupHomes:
    """The groups along one axis. by_tier: how many of them have their highest transfer there; only tiers with any."""

    axis: str
    group_size: int
    num_groups: int
    by_tier: Mapping[str, int]


def find_homes(placement: Placement, fabric: Fabric | None, traffic: Sequence[AxisTraffic]) -> tuple[GroupHomes, ...]:
    """The homes of the groups of each axis that carries traffic, innermost first."""
    mesh = placement.mesh
    found = []
    for entry in sorted(traffic, key=lambda entry: -AXES.index(entry.axis)):
        if fabric is not None:
            routed = route(placement, fabric, [entry])
            sender, tier = routed.transfers.sender, routed.tier
        else:
            listed = transfers(mesh, [entry])
            nodes = placement.node_of_rank
            sender, tier = listed.sender, np.where(nodes[listed.sender] == nodes[listed.receiver], 0, len(TIERS))
        group = group_numbers(mesh, entry.axis)
        num_groups = mesh.world_size // getattr(mesh, entry.axis)
        highest = np.zeros(num_groups, np.int64)
        np.maximum.at(highest, group[sender], tier)
        names = (*TIERS, BEYOND_NODE)
        counts = np.bincount(highest, minlength=len(names)).tolist()
        by_tier = {name: count for name, count in zip(names, counts, strict=True) if count}
        found.append(GroupHomes(entry.axis, getattr(mesh, entry.axis), num_groups, by_tier))
    return tuple(found)


def group_numbers(mesh: Mesh, axis: str) -> np.ndarray:
    """For each rank the number of its group along an axis."""
    degrees = tuple(1 if other == axis else degree for other, degree in mesh.axes.items())
    grid = np.arange(mesh.world_size // getattr(mesh, axis)).reshape(degrees)
    return np.broadcast_to(grid, tuple(mesh.axes.values())).ravel()

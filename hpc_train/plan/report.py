"""All that is known of a plan before a run starts, as one value: placement, traffic before and after, memory, time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.fabric import TIERS, Fabric
from hpc_train.config import Config
from hpc_train.plan.axis_bytes import AxisTraffic, axis_traffic
from hpc_train.plan.homes import GroupHomes, find_homes
from hpc_train.plan.memory import MemoryEstimate, check_memory, fullest_stage
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.placement import Placement, place, slurm_placement
from hpc_train.plan.run import Plan, plan_placement, world_mesh
from hpc_train.plan.traffic import Traffic, measure_traffic


@dataclass(frozen=True)
class PlanReport:
    """A plan, and what it was made from.

    slurm: where Slurm's own order would put the ranks. fabric: None where no topology is known; then so are planned
    and before, the traffic of one step in the planned and in Slurm's order. homes: where the groups of each axis live.
    fullest: the pipeline stage whose ranks need most memory, and what for. notes: for the user.
    """

    name: str
    allocation: Allocation
    fabric: Fabric | None
    traffic: tuple[AxisTraffic, ...]
    placement: Placement
    slurm: Placement
    homes: tuple[GroupHomes, ...]
    planned: Traffic | None
    before: Traffic | None
    fullest: tuple[int, MemoryEstimate]
    gpu_memory_bytes: int | None
    notes: tuple[str, ...]

    @property
    def mesh(self) -> Mesh:
        return self.placement.mesh

    @cached_property
    def is_moved(self) -> bool:
        """Whether any rank is elsewhere than in Slurm's order."""
        return not (
            self.placement.nodes == self.slurm.nodes
            and np.array_equal(self.placement.node_of_rank, self.slurm.node_of_rank)
            and np.array_equal(self.placement.gpu_of_rank, self.slurm.gpu_of_rank)
        )

    @property
    def size(self) -> str:
        """Ranks, nodes and mesh in a few words."""
        num_nodes = len(self.placement.nodes)
        nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes"
        return f"{self.mesh.world_size} ranks on {nodes}, {self.mesh.describe()}"

    @property
    def origin(self) -> str:
        """The order, and where the fabric is from."""
        source = "no topology is known" if self.fabric is None else f"fabric from {self.fabric.source}"
        return f"order {self.placement.order}, {source}"

    @cached_property
    def plan(self) -> Plan:
        """What plan.json holds."""
        return plan_placement(self.placement, self._figures())

    def _figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "order": self.placement.order,
            "fabric": None if self.fabric is None else self.fabric.source,
            "bytes_per_rank": {entry.axis: sent_bytes(entry) for entry in self.traffic},
        }
        if self.planned is not None and self.before is not None:
            sides = {"slurm_order": self.before, "planned": self.planned}
            figures["traffic"] = {
                **{name: {tier: side.bytes_by_tier.get(tier, 0) for tier in TIERS} for name, side in sides.items()},
                "byte_hops": {name: side.byte_hops for name, side in sides.items()},
                "busiest_uplink": {name: _uplink(side) for name, side in sides.items()},
            }
        figures["estimate"] = {"memory_bytes": self.fullest[1].total}
        return figures


def _uplink(side: Traffic) -> dict[str, Any] | None:
    uplink = side.busiest_uplink
    return None if uplink is None else {"name": uplink.name, "bytes": uplink.num_bytes, "seconds": uplink.seconds}


def sent_bytes(entry: AxisTraffic) -> int:
    """What a rank sends along an axis in one step."""
    return entry.forward_bytes + entry.backward_bytes


def report_plan(
    config: Config, allocation: Allocation, fabric: Fabric | None, order: str | None = None, notes: tuple[str, ...] = ()
) -> PlanReport:
    """Plan a run on an allocation.

    Args:
        order: instead of fabric.order.
        notes: from whoever found the fabric.

    Raises:
        ConfigError: the mesh does not fill the allocation, the model or batch cannot be split so, a tp group does not
            fit into a node, the fabric lacks a node, or the run needs more memory than fabric.gpu_memory_bytes.
    """
    mesh = world_mesh(config, allocation)
    traffic = axis_traffic(config, mesh)
    if config.fabric.gpu_memory_bytes is not None:
        check_memory(config, mesh, config.fabric.gpu_memory_bytes)
    placement = place(mesh, allocation, fabric, traffic, order or config.fabric.order)
    slurm = slurm_placement(mesh, allocation)
    told = dict.fromkeys((*notes, *placement.notes))
    if fabric is not None:
        told.pop(f"fabric from {fabric.source}", None)
    return PlanReport(
        name=config.name,
        allocation=allocation,
        fabric=fabric,
        traffic=traffic,
        placement=placement,
        slurm=slurm,
        homes=find_homes(placement, fabric, traffic),
        planned=None if fabric is None else measure_traffic(placement, fabric, traffic),
        before=None if fabric is None else measure_traffic(slurm, fabric, traffic),
        fullest=fullest_stage(config, mesh),
        gpu_memory_bytes=config.fabric.gpu_memory_bytes,
        notes=tuple(told),
    )

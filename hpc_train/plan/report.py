"""All that is known of a plan before a run starts, as one value: placement, traffic before and after, memory, time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.fabric import TIERS, Fabric
from hpc_train.config import Config
from hpc_train.plan.axis_bytes import AxisTraffic, axis_traffic
from hpc_train.plan.batch_of_run import set_up_batches_of
from hpc_train.plan.batch_places import hdp_figures
from hpc_train.plan.checkpoint_flow import CheckpointFlow, plan_checkpoint
from hpc_train.plan.ecmp import EcmpEstimate, estimate_ecmp
from hpc_train.plan.estimate import MEGATRON_LM, Rates, StepEstimate, estimate_step
from hpc_train.plan.hidden import best_hidden
from hpc_train.plan.hidden_messages import best_hidden_messages
from hpc_train.plan.hidden_tiles import best_hidden_tiles
from hpc_train.plan.homes import GroupHomes, find_homes
from hpc_train.plan.memory import MemoryEstimate, check_memory, fullest_stage
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.nccl_settings import NcclSetting, nccl_settings
from hpc_train.plan.peer_copies import COPY_HOLDERS, plan_peer_copies
from hpc_train.plan.place import place
from hpc_train.plan.placement import Placement, slurm_placement
from hpc_train.plan.run import RAILS, Plan, plan_placement, world_mesh
from hpc_train.plan.traffic import Traffic, measure_traffic

_MEGATRON_LM_CARD_BYTES_PER_S = 25e9  # cited: MegaScale (NSDI'24), section 6: one 200 Gb/s card a GPU


@dataclass(frozen=True)
class PlanReport:
    """A plan, and what it was made from.

    slurm: where Slurm's own order would put the ranks. fabric: None where no topology is known; then so are planned and
    before, the traffic of one step in the planned and in Slurm's order, and hashed and hashed_before, how evenly
    switches spread it over their links. homes: where the groups of each axis live. nccl: what the plan wants of NCCL.
    fullest: the pipeline stage whose ranks need most memory, and what for. estimate: bubble, step time, utilisation.
    dp_hidden, pp_hidden, tp_hidden: what can be hidden of an axis' transfers at best, by their ratio to compute.
    hdp: where hdp ranks are in the network, for a run with parallel.hdp; None for others. copy_holders: by node the one
    that keeps its copy, for a run with checkpoint.local; None for others. rails: by rank, where the
    fabric says them; None where a rank's slot on its node is all that is known. checkpoint: who writes and reads it.
    notes: for the user.
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
    hashed: EcmpEstimate | None
    hashed_before: EcmpEstimate | None
    nccl: tuple[NcclSetting, ...]
    fullest: tuple[int, MemoryEstimate]
    estimate: StepEstimate
    dp_hidden: tuple[tuple[float, float], ...]
    pp_hidden: tuple[tuple[float, float], ...]
    tp_hidden: tuple[tuple[float, float], ...]
    gpu_memory_bytes: int | None
    checkpoint: CheckpointFlow
    notes: tuple[str, ...]
    hdp: Mapping[str, Any] | None = None
    copy_holders: tuple[int, ...] | None = None
    rails: tuple[int, ...] | None = None

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
    def all_notes(self) -> tuple[str, ...]:
        """Also those on how the estimate is known, and what is wanted of NCCL."""
        wanted = (f"wanted of NCCL: {setting.name}={setting.value}: {setting.reason}" for setting in self.nccl)
        return (*self.notes, *self.estimate.notes, *wanted)

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
        if self.hdp is not None:
            figures["hdp"] = self.hdp
        if self.copy_holders is not None:
            figures[COPY_HOLDERS] = list(self.copy_holders)
        if self.rails is not None:
            figures[RAILS] = list(self.rails)
        figures["checkpoint"] = asdict(self.checkpoint)
        figures["nccl"] = {setting.name: setting.value for setting in self.nccl}
        figures["estimate"] = {
            "memory_bytes": self.fullest[1].total,
            "bubble": self.estimate.bubble,
            "step_time_s": self.estimate.step_time_s,
            "mfu": self.estimate.mfu,
            "dp_hidden_at_best": {str(ratio): share for ratio, share in self.dp_hidden},
            "pp_hidden_at_best": {str(ratio): share for ratio, share in self.pp_hidden},
            "tp_hidden_at_best": {str(ratio): share for ratio, share in self.tp_hidden},
        }
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
    rates = assumed_rates(config, fabric)
    estimate = estimate_step(config, mesh, rates)
    hdp = None
    if config.parallel.hdp is not None:
        hdp = hdp_figures(placement, fabric)
        set_up_batches_of(config, mesh, hdp)  # refuses what ranks would refuse
    copies = None if config.checkpoint.local is None else plan_peer_copies(placement, fabric)
    rails = _rails(placement, fabric)
    dp_hidden, pp_hidden = best_hidden(config, mesh), best_hidden_messages(config, mesh)
    too_long = (mesh.dp > 1 and config.parallel.overlap and not dp_hidden, mesh.pp > 1 and not pp_hidden)
    not_played = [
        f"what can be hidden of {axis}'s transfers at best is not known: its schedule is too long to be played"
        for axis, is_too_long in zip(("dp", "pp"), too_long, strict=True)
        if is_too_long
    ]
    told = dict.fromkeys((*notes, *placement.notes, *(() if copies is None else copies.notes), *not_played))
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
        hashed=None if fabric is None else estimate_ecmp(placement, fabric, traffic),
        hashed_before=None if fabric is None else estimate_ecmp(slurm, fabric, traffic),
        nccl=nccl_settings(placement, fabric, traffic),
        fullest=fullest_stage(config, mesh),
        estimate=estimate,
        dp_hidden=dp_hidden,
        pp_hidden=pp_hidden,
        tp_hidden=best_hidden_tiles(config, mesh),
        gpu_memory_bytes=config.fabric.gpu_memory_bytes,
        notes=tuple(told),
        hdp=hdp,
        copy_holders=None if copies is None else copies.holder,
        checkpoint=plan_checkpoint(config, placement, placement.gpu_of_rank if rails is None else np.array(rails)),
        rails=rails,
    )


def _rails(placement: Placement, fabric: Fabric | None) -> tuple[int, ...] | None:
    if fabric is None or not fabric.are_rails_known:
        return None
    of_node = [fabric.nodes[node] for node in placement.nodes]
    places = zip(placement.node_of_rank.tolist(), placement.gpu_of_rank.tolist(), strict=True)
    return tuple(of_node[node].rail(gpu) for node, gpu in places)


def assumed_rates(config: Config, fabric: Fabric | None) -> Rates:
    """The peak that the configuration names, at the shares of peak and card that Megatron-LM's published runs reached.

    What neither the configuration nor the fabric tells stays unknown.
    """
    card = None if fabric is None else fabric.link_bytes_per_s.get("leaf")
    assert MEGATRON_LM.dp_bytes_per_s is not None
    share = MEGATRON_LM.dp_bytes_per_s / _MEGATRON_LM_CARD_BYTES_PER_S
    origin = "train.peak_flops_per_rank and the fabric's link speed, at the shares that Megatron-LM's 175B runs reached"
    dp_bytes_per_s = None if card is None else share * card
    return Rates(config.train.peak_flops_per_rank, MEGATRON_LM.efficiency, dp_bytes_per_s, origin)

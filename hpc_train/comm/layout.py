"""Who is which rank in a script of one's own: the ranks tell where they are, one of them plans, all look themselves up.

1. every rank tells its node, its slot there and its address in Slurm's topology
2. rank 0 finds the fabric and places the mesh on it
3. the plan is broadcast as JSON, whose hash every rank checks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpc_train import log
from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.fabric_find import FoundFabric, find_fabric
from hpc_train.cluster.fabric_node import NodeReport
from hpc_train.comm.control import Control
from hpc_train.errors import ConfigError, LaunchError
from hpc_train.plan.axis_bytes import AxisTraffic
from hpc_train.plan.mesh import AXES, Mesh
from hpc_train.plan.place import place
from hpc_train.plan.placement import AUTO_ORDER, SLURM_ORDER
from hpc_train.plan.run import Plan, PlannedRank, plan_placement


@dataclass(frozen=True)
class Layout:
    """The mesh that a script wants, and how it is laid over the nodes.

    pp, cp, tp: degrees; dp: what they leave over, unless given. order: "auto", "slurm" (leave ranks alone) or the axes
    from the innermost to the outermost, such as "tp,dp,pp,cp". fabric: files or "clos:..."; left out, what Slurm
    tells. bytes_per_step: what a rank sends along an axis in one step; axes that are left out count as the largest one
    that is given.
    """

    pp: int = 1
    dp: int | None = None
    cp: int = 1
    tp: int = 1
    order: str = AUTO_ORDER
    fabric: str | None = None
    bytes_per_step: Mapping[str, int] = field(default_factory=dict)

    def mesh(self, world_size: int) -> Mesh:
        """The mesh of all ranks that were started.

        Raises:
            ConfigError: the degrees do not fill it.
        """
        return Mesh.fill(world_size, pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp)

    def traffic(self, mesh: Mesh) -> tuple[AxisTraffic, ...]:
        """What placement weighs: rings, and lines both ways for pp; tp is inside a node anyway.

        Raises:
            ConfigError: bytes of something that is no axis, or no whole number of 0 or more.
        """
        for axis, num_bytes in self.bytes_per_step.items():
            if axis not in AXES:
                raise ConfigError(f"bytes_per_step names {axis!r}, which is no axis; the axes are {', '.join(AXES)}")
            if not isinstance(num_bytes, int) or isinstance(num_bytes, bool) or num_bytes < 0:
                raise ConfigError(
                    f"bytes_per_step has {num_bytes!r} for {axis}; give a whole number of bytes, 0 or more"
                )
        likely = max(self.bytes_per_step.values(), default=1)
        entries = []
        for axis in (axis for axis in AXES if mesh.axes[axis] > 1):
            num_bytes = self.bytes_per_step.get(axis, likely)
            is_line = axis == "pp"
            entries.append(AxisTraffic(axis, "line" if is_line else "ring", num_bytes, num_bytes if is_line else 0))
        return tuple(entries)


def agree_on_layout(control: Control, layout: Layout | None) -> None:
    """Collective over all ranks.

    Raises:
        LaunchError: a rank asks for another layout than rank 0, or one asks for none; on all ranks.
    """
    compared = control.compare(repr(layout), note=repr(layout))
    if compared.num_different:
        other = "another one" if repr(layout) == compared.note else repr(layout)
        error = LaunchError(
            f"{compared.num_different} of {control.size} ranks ask for another layout than rank 0 ({compared.note}), "
            f"the first of them rank {compared.first_different} ({other}). Give bootstrap the same layout everywhere."
        )
        error.reporter = 0
        raise error


def plan_layout(control: Control, layout: Layout, slots: Sequence[tuple[str, int]], env: Mapping[str, str]) -> Plan:
    """The plan of all ranks for their slots, each once, by the launcher's rank. Collective.

    Raises:
        ConfigError: the mesh does not fill the world or fit the nodes, or the fabric cannot be used.
    """
    reports = control.all_gather([env.get("SLURM_TOPOLOGY_ADDR", ""), env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")])
    text, error = None, None
    if control.rank == 0:
        try:
            text = _plan(layout, slots, reports, env).to_json()
        except (ConfigError, LaunchError) as problem:
            error = problem
    control.agree(error)
    return Plan.from_json(control.broadcast(text))


def keep_order(layout: Layout, slots: Sequence[tuple[str, int]], rank: int) -> Plan:
    """The plan where another launcher has numbered the ranks already: rank i is the one of slots[i]. Not collective.

    Raises:
        ConfigError: the mesh does not fill the world.
        LaunchError: another order was asked for.
    """
    mesh = layout.mesh(len(slots))
    if layout.order not in (AUTO_ORDER, SLURM_ORDER) or layout.fabric is not None:
        orders = [] if layout.order in (AUTO_ORDER, SLURM_ORDER) else [f"order={layout.order!r}"]
        asked = [*orders, *([] if layout.fabric is None else [f"fabric={layout.fabric!r}"])]
        raise LaunchError(
            f"Layout asks for a placement by {' and '.join(asked)}, but torchrun's variable RANK numbers the ranks "
            f"already. Start with srun or mpirun, which leave that to the plan, or leave {' and '.join(asked)} out."
        )
    ranks = tuple(PlannedRank(number, node, slot, mesh.coords(number)) for number, (node, slot) in enumerate(slots))
    if rank == 0:
        split = [group for group in mesh.groups("tp") if len({slots[member][0] for member in group}) > 1]
        if split:
            log.warn(
                f"{len(split)} of {len(mesh.groups('tp'))} tp groups reach over several nodes, such as ranks "
                f"{', '.join(map(str, split[0]))}: RANK numbers them so. Start with srun or mpirun instead."
            )
    return Plan(mesh, ranks)


def _plan(
    layout: Layout, slots: Sequence[tuple[str, int]], addresses: Sequence[Sequence[str]], env: Mapping[str, str]
) -> Plan:
    """Rank 0's work."""
    mesh = layout.mesh(len(slots))
    allocation = _allocation(slots)
    found = _fabric(layout, allocation, slots, addresses, env)
    is_one_node = found.fabric is None and len(allocation.nodes) == 1
    order = SLURM_ORDER if is_one_node and layout.order == AUTO_ORDER else layout.order
    placement = place(mesh, allocation, found.fabric, layout.traffic(mesh), order)
    for note in dict.fromkeys((*found.notes, *placement.notes)):
        log.say(note)
    return plan_placement(placement, {})


def _allocation(slots: Sequence[tuple[str, int]]) -> Allocation:
    """Nodes in the order of the launcher's ranks, and how many tasks each has."""
    of_node: dict[str, list[int]] = {}
    for node, slot in slots:
        of_node.setdefault(node, []).append(slot)
    for node, taken in of_node.items():
        if sorted(taken) != list(range(len(taken))):
            raise LaunchError(
                f"the tasks of node {node} have the local ranks {', '.join(map(str, sorted(taken)))}, not 0 to "
                f"{len(taken) - 1} each once. Start all of them by one srun or mpirun."
            )
    counts = tuple(len(taken) for taken in of_node.values())
    return Allocation(tuple(of_node), counts, counts, None, "the ranks that were started")


def _fabric(
    layout: Layout,
    allocation: Allocation,
    slots: Sequence[tuple[str, int]],
    addresses: Sequence[Sequence[str]],
    env: Mapping[str, str],
) -> FoundFabric:
    """One node has nothing to place unless the user names a fabric; nor has an order that leaves ranks alone."""
    if layout.order == SLURM_ORDER or (layout.fabric is None and len(allocation.nodes) == 1):
        return FoundFabric(None)
    by_node = {
        node: NodeReport(node, address, pattern) for (node, _), (address, pattern) in zip(slots, addresses, strict=True)
    }
    return find_fabric(
        layout.fabric, allocation.nodes, env, gather=lambda: [by_node[node] for node in allocation.nodes]
    )

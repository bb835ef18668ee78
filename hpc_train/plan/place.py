"""Give each rank a GPU of a node, so that as little as can be is sent over the switches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.fabric import Fabric
from hpc_train.errors import ConfigError
from hpc_train.plan.axis_bytes import AxisTraffic
from hpc_train.plan.changes import SizesError, nearest, one_of
from hpc_train.plan.choose import choose_seats
from hpc_train.plan.mesh import AXES, Mesh
from hpc_train.plan.nesting import fill_order, whole_axes
from hpc_train.plan.placement import AUTO_ORDER, SLURM_ORDER, Placement, make_placement, slurm_placement
from hpc_train.plan.seats import Seats, find_edges, find_seats, too_few_seats
from hpc_train.plan.traffic import busiest, byte_hops_milli, route

KNOWN_ORDERS = (("tp", "cp", "dp", "pp"), ("tp", "cp", "pp", "dp"))
"""Innermost first. Cited: MegaScale (NSDI'24) has dp inside pp, Llama 3 (arXiv 2407.21783) has it outside."""


def place(
    mesh: Mesh,
    allocation: Allocation,
    fabric: Fabric | None,
    traffic: Sequence[AxisTraffic],
    order: str = AUTO_ORDER,
    exclude: Collection[str] = (),
) -> Placement:
    """Give each rank a node and a slot.

    "auto" has the fewest byte-hops of all that was tried, then the least time on the busiest uplink, and leaves Slurm's
    order alone where nothing is better. "slurm" is Slurm's order. Axes from the innermost to the outermost, such as
    "tp,dp,pp" or "tp,cp,pp,dp", fill the seats in the order of the switches. Without a fabric it is Slurm's order too.

    Args:
        traffic: What each axis sends, which decides what gets the near switches.
        exclude: Nodes that get no ranks.

    Raises:
        ConfigError: tp groups do not fit into the nodes, the fabric has not a node, no link of a node or no link up
            from a leaf or pod works that has to, or an order that is none.
    """
    placement = _placed(mesh, allocation, fabric, traffic, order, exclude)
    if fabric is not None and 0 in (*fabric.leaf_uplinks.values(), *fabric.pod_uplinks.values()):
        for uplink in route(placement, fabric, traffic).uplinks(fabric):
            if uplink.num_links == 0:
                raise ConfigError(
                    f"no link leads up from {uplink.name}, as {fabric.source} says, but {uplink.num_bytes} bytes a "
                    "step would have to climb there. Leave its nodes out by fabric.exclude, or correct its uplinks"
                )
    return placement


def _placed(
    mesh: Mesh,
    allocation: Allocation,
    fabric: Fabric | None,
    traffic: Sequence[AxisTraffic],
    order: str,
    exclude: Collection[str],
) -> Placement:
    axes = _axes_of_order(order, mesh)
    if order == SLURM_ORDER or fabric is None:
        by_slurm = slurm_placement(mesh, allocation, exclude)
        # That no fabric is known says who looked for one.
        notes = [] if axes is None else [f"the order {order} has no effect without a fabric"]
        _check_whole(by_slurm, allocation, fabric, exclude)
        return replace(by_slurm, notes=tuple(notes))
    seats = find_seats(mesh, allocation, fabric, exclude)
    if axes is not None:
        return _seated(mesh, allocation, seats, _by_axes(mesh, axes), order)
    edges = find_edges(mesh, traffic, int(seats.distance.max()))
    found = [choose_seats(mesh, seats, edges, traffic, fabric)]
    if not edges.is_exact:
        found += [_by_axes(mesh, known) for known in KNOWN_ORDERS]
    planned = [_seated(mesh, allocation, seats, seat_of_block, order) for seat_of_block in found]
    by_slurm = slurm_placement(mesh, allocation, exclude)
    if _is_whole(by_slurm, fabric).all():
        note = "Slurm's order is left alone: nothing was found that sends less over the switches"
        planned.insert(0, replace(by_slurm, order=order, notes=(*seats.notes, note)))
    return min(planned, key=lambda placement: _key(placement, fabric, traffic))


def check_seats(mesh: Mesh, allocation: Allocation, fabric: Fabric | None, order: str = AUTO_ORDER) -> None:
    """Refuse an order that is none, and tp groups that do not fit into the nodes, without placing anything.

    Raises:
        ConfigError: as `place`, but for links that do not work.
    """
    _axes_of_order(order, mesh)
    if order == SLURM_ORDER or fabric is None:
        _check_whole(slurm_placement(mesh, allocation), allocation, fabric, ())
    else:
        find_seats(mesh, allocation, fabric)


def _check_whole(placement: Placement, allocation: Allocation, fabric: Fabric | None, exclude: Collection[str]) -> None:
    """Refuse tp groups that Slurm's order spreads over several nodes."""
    mesh = placement.mesh
    num_torn = int(np.count_nonzero(~_is_whole(placement, fabric)))
    if not num_torn:
        return
    kept = [at for at, node in enumerate(allocation.nodes) if node not in exclude]
    counts = [allocation.tasks_per_node[at] for at in kept]
    num_seats = sum(count // mesh.tp for count in counts)
    if num_seats < mesh.world_size // mesh.tp:
        unknown = "" if fabric is not None else " No fabric is known, so no NVLink domain is; fabric.source names one."
        raise too_few_seats(mesh, [allocation.nodes[at] for at in kept], counts, num_seats, unknown)
    fits = [degree for degree in range(1, max(counts) + 1) if all(count % degree == 0 for count in counts)]
    by_switches = [] if fabric is None else one_of("fabric.order", [AUTO_ORDER])
    raise SizesError(
        f"in Slurm's order {num_torn} of {mesh.world_size // mesh.tp} tp groups are spread over several nodes, and a "
        "tp group stays inside one node, or one NVLink domain.",
        by_switches + one_of("parallel.tp", nearest(fits, mesh.tp)),
        "Use fabric.order=auto with a fabric, or a tp that divides the ranks of every node",
    )


def _by_axes(mesh: Mesh, axes: Sequence[str]) -> np.ndarray:
    """The seat of each block where axes, innermost first, fill the seats in the order of the switches."""
    seat_of_block = np.empty(mesh.world_size // mesh.tp, np.int64)
    pieces = whole_axes(mesh, [axis for axis in axes if axis != "tp"])
    seat_of_block[fill_order(mesh, pieces)] = np.arange(len(seat_of_block))
    return seat_of_block


def _axes_of_order(order: str, mesh: Mesh) -> tuple[str, ...] | None:
    """The axes of an explicit order, innermost first; None for a named one."""
    if order in (AUTO_ORDER, SLURM_ORDER):
        return None
    axes = tuple(part.strip() for part in order.split(","))
    missing = [axis for axis in AXES if axis not in axes and getattr(mesh, axis) > 1]
    if not {*axes} <= {*AXES} or len({*axes}) < len(axes) or axes[0] != "tp" or missing:
        lacking = f": {missing[0]} is missing" if missing else ""
        raise ConfigError(
            f"order={order} is not an order of the axes of a mesh of {mesh.describe()}{lacking}. Use auto, slurm, or "
            "the axes from the innermost to the outermost, tp first, since it stays inside a node: for example "
            "tp,cp,dp,pp"
        )
    return (*axes, *(axis for axis in AXES if axis not in axes))


def _seated(mesh: Mesh, allocation: Allocation, seats: Seats, seat_of_block: np.ndarray, order: str) -> Placement:
    node, gpu = seats.node[seat_of_block].ravel(), seats.gpu[seat_of_block].ravel()
    notes = list(seats.notes)
    idle = len(seats) - len(seat_of_block)
    if idle:
        notes.append(f"room for {idle} more tp groups of {mesh.tp} stays empty")
    return make_placement(mesh, allocation.nodes, node, gpu, order, tuple(notes))


def _is_whole(placement: Placement, fabric: Fabric | None) -> np.ndarray:
    """For each tp group whether it is inside one node or NVLink domain."""
    known = {} if fabric is None else fabric.nodes
    domain = {name: known[name].nvlink_domain if name in known else None for name in placement.nodes}
    names = [f"node {name}" if domain[name] is None else f"domain {domain[name]}" for name in placement.nodes]
    number = np.unique(names, return_inverse=True)[1][placement.node_of_rank].reshape(-1, placement.mesh.tp)
    return (number == number[:, :1]).all(axis=1)


def _key(placement: Placement, fabric: Fabric, traffic: Sequence[AxisTraffic]) -> tuple[int, float, int]:
    """What placements are compared by, all of it exact but for the time."""
    routed = route(placement, fabric, traffic)
    uplink = busiest(routed.uplinks(fabric))
    seconds, num_bytes = (0.0, 0) if uplink is None else (uplink.seconds or 0.0, uplink.num_bytes)
    return byte_hops_milli(routed.bytes_by_tier(), fabric), seconds, num_bytes

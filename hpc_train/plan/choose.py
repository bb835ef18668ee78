"""The search for the placement with the fewest byte-hops: fill by many orders, improve the best, keep the best."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

from hpc_train.cluster.fabric import Fabric
from hpc_train.plan.axis_bytes import AxisTraffic
from hpc_train.plan.improve import hosts_frame, search_quickly, search_thoroughly, seats_frame, turn_hosts
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.nesting import (
    BLOCK_AXES,
    Piece,
    Surroundings,
    aligned_order,
    expected_cost,
    fill_order,
    nestings,
    whole_axes,
)
from hpc_train.plan.seats import Edges, Seats, cost

# All of these are assumed: they bound the work to about a second at 16,384 GPUs, and more gained nothing in
# docs/measurements/placement.md.
FILLINGS_MEASURED = 1 << 16
"""Blocks filled in all while orders are compared."""
HOSTS_SEARCHED_THOROUGHLY, SEATS_SEARCHED_THOROUGHLY = 512, 128
MOST_STARTS, SEATS_IMPROVED = 6, 1024
"""Fillings that are improved: so many, fewer where their seats together would be more than this; two at least."""
MOST_ROUNDS, PATIENCE_A_UNIT = 200, 2
"""Exchanges in a thorough search, and how many, for each unit, may pass without a better placement."""
QUICK_PASSES, TURN_PASSES = 60, 30
FEW_PODS = 4
"""Up to so many pods are tried in every order."""


def choose_seats(mesh: Mesh, seats: Seats, edges: Edges, traffic: Sequence[AxisTraffic], fabric: Fabric) -> np.ndarray:
    """The seat of each block."""
    starts = _fillings(mesh, seats, edges, traffic, fabric)
    improved = [improve(seats, edges, start) for start in starts[: _num_starts(len(seats))]]
    return min(improved, key=lambda found: cost(seats, edges, found))


def improve(seats: Seats, edges: Edges, seat_of_block: np.ndarray) -> np.ndarray:
    """The placement after local search."""
    found = turn_hosts(seats, edges, seat_of_block, TURN_PASSES)
    for _ in range(2):
        before = cost(seats, edges, found)
        found = _move_hosts(seats, edges, found)
        if seats.num_hosts < len(seats):
            found = turn_hosts(seats, edges, found, TURN_PASSES)
            if len(seats) <= SEATS_SEARCHED_THOROUGHLY:
                found = _move_blocks(seats, edges, found)
        if cost(seats, edges, found) == before:
            break
    return found


def _num_starts(num_seats: int) -> int:
    return max(2, min(MOST_STARTS, SEATS_IMPROVED // num_seats))


def _move_hosts(seats: Seats, edges: Edges, seat_of_block: np.ndarray) -> np.ndarray:
    frame = hosts_frame(seats, edges, seat_of_block)
    here = np.arange(seats.num_hosts)
    if seats.num_hosts <= HOSTS_SEARCHED_THOROUGHLY:
        spot = search_thoroughly(frame, here, MOST_ROUNDS, PATIENCE_A_UNIT * seats.num_hosts)
    else:
        spot = search_quickly(frame, here, QUICK_PASSES)
    first_seat = np.searchsorted(seats.host, here)
    host = seats.host[seat_of_block]
    return first_seat[spot[host]] + seat_of_block - first_seat[host]


def _move_blocks(seats: Seats, edges: Edges, seat_of_block: np.ndarray) -> np.ndarray:
    frame = seats_frame(seats, edges, len(seat_of_block))
    empty = np.setdiff1d(np.arange(len(seats)), seat_of_block)
    start = np.concatenate([seat_of_block, empty])
    spot = search_thoroughly(frame, start, MOST_ROUNDS, PATIENCE_A_UNIT * len(seats))
    return spot[: len(seat_of_block)]


def _fillings(
    mesh: Mesh, seats: Seats, edges: Edges, traffic: Sequence[AxisTraffic], fabric: Fabric
) -> list[np.ndarray]:
    """Placements made by filling seats in an order of the blocks, the best first; no two alike."""
    num_blocks = mesh.world_size // mesh.tp
    every = np.arange(len(seats))
    found: dict[bytes, tuple[int, int, np.ndarray]] = {}
    orders: list[tuple[int, tuple[Piece, ...], np.ndarray]] = []

    def add(pieces: tuple[Piece, ...], order: np.ndarray, seat_order: np.ndarray) -> None:
        seat_of_block = np.empty(num_blocks, np.int64)
        seat_of_block[order] = seat_order[:num_blocks]
        key = seat_of_block.tobytes()
        if key not in found:
            paid = cost(seats, edges, seat_of_block)
            found[key] = (paid, len(found), seat_of_block)
            orders.append((paid, pieces, order))

    for axes in itertools.permutations(BLOCK_AXES):
        pieces = whole_axes(mesh, axes)
        add(pieces, fill_order(mesh, pieces), every)
    around = _surroundings(mesh, seats, fabric)
    bytes_of = _bytes_of_axes(mesh, traffic)
    most = max(8, min(48, FILLINGS_MEASURED // num_blocks))
    promising = heapq.nsmallest(
        most, enumerate(nestings(mesh)), key=lambda item: (expected_cost(mesh, item[1], bytes_of, around), item[0])
    )
    host_size = round(around.sizes[0])
    for (_, pieces), is_snake in itertools.product(promising, (False, True)):
        add(pieces, fill_order(mesh, pieces, is_snake=is_snake, host_size=host_size), every)
    ranked = sorted(range(len(orders)), key=lambda at: (orders[at][0], at))
    for at in ranked[: max(2, most // 6)]:
        _, pieces, order = orders[at]
        for seat_order in _seat_orders(seats, pieces, around, most):
            add(pieces, order, seat_order)
    return [seat_of_block for _, _, seat_of_block in sorted(found.values(), key=lambda item: item[:2])]


def _bytes_of_axes(mesh: Mesh, traffic: Sequence[AxisTraffic]) -> dict[str, tuple[int, int]]:
    """Of each axis that crosses blocks: bytes between neighbours, and between the ends."""
    found = {}
    for entry in traffic:
        if entry.axis in BLOCK_AXES and getattr(mesh, entry.axis) > 1:
            both = entry.forward_bytes + entry.backward_bytes
            found[entry.axis] = (both, 2 * entry.ends_bytes + (0 if entry.pattern == "line" else both))
    return found


def _surroundings(mesh: Mesh, seats: Seats, fabric: Fabric) -> Surroundings:
    weights = fabric.hop_weights
    counts = (seats.num_hosts, int(seats.group.max()) + 1, int(seats.pod.max()) + 1)
    sizes = tuple(len(seats) / count for count in counts)
    leaf, spine, core = weights["leaf"], weights["spine"], weights["core"]
    return Surroundings((sizes[0], sizes[1], sizes[2]), (leaf, spine - leaf, core - spine))


def _seat_orders(seats: Seats, pieces: Sequence[Piece], around: Surroundings, most: int) -> list[np.ndarray]:
    """Other orders of the seats: pods and leaves arranged so that their borders fall between runs of the nesting.

    All orders of the pods where they are few, as many as `most`; else one in which their borders do too.
    """
    units = [1]
    for piece in pieces:
        units.append(units[-1] * piece.extent)
    leaf_units = [unit for unit in units if 1 < unit <= 2 * around.sizes[1]][-2:] or [1]
    pod_unit = ([unit for unit in units if 1 < unit <= 2 * around.sizes[2]] or [1])[-1]
    pod_of_seat = seats.pod[seats.host]
    sizes = np.bincount(pod_of_seat).tolist()
    pod_orders = [_order_of_parts(sizes, pod_unit, 0), _order_of_parts(sizes, 1, 0)]
    if len(sizes) <= FEW_PODS and math.factorial(len(sizes)) <= most:
        pod_orders += [list(order) for order in itertools.permutations(range(len(sizes)))]
        leaf_units = sorted({*leaf_units, pod_unit})
    found = [_arranged(seats, pods, unit) for pods, unit in itertools.product(pod_orders, leaf_units)]
    return [*found, _arranged(seats, pod_orders[1], 1)]


def _arranged(seats: Seats, pods: Sequence[int], leaf_unit: int) -> np.ndarray:
    """Seats by pods in this order, then by leaves in an aligned order; with a unit of 1, the largest leaf first."""
    pod, group = seats.pod[seats.host], seats.group[seats.host]
    parts: list[np.ndarray] = []
    filled = 0
    for number in pods:
        inside = np.flatnonzero(pod == number)
        group_seats = [inside[group[inside] == leaf] for leaf in np.unique(group[inside])]
        for chosen in _order_of_parts([len(part) for part in group_seats], leaf_unit, filled):
            parts.append(group_seats[chosen])
            filled += len(group_seats[chosen])
    return np.concatenate(parts)


def _order_of_parts(sizes: Sequence[int], unit: int, start: int) -> list[int]:
    if unit == 1:
        return sorted(range(len(sizes)), key=lambda at: (-sizes[at], at))
    return aligned_order(sizes, unit, start)

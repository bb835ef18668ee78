"""The true optimum of small placement problems, by trying every assignment of blocks to seats."""

from __future__ import annotations

import numpy as np
from numba import njit

from hpc_train.plan.seats import Edges, Seats


def lowest_cost(seats: Seats, edges: Edges, num_blocks: int) -> int:
    """The lowest cost of all assignments. A start is given up only where it costs as much as the best whole one."""
    weight = np.zeros((num_blocks, num_blocks), np.int64)
    weight[edges.a, edges.b] = edges.weight
    weight += weight.T
    every = np.arange(len(seats))
    return int(_lowest(weight, seats.between(every[:, None], every[None, :])))


@njit(cache=True)
def _lowest(weight, distance):  # type: ignore[no-untyped-def]
    num_blocks, num_seats = len(weight), len(distance)
    best = np.iinfo(np.int64).max
    seat = np.full(num_blocks, -1)
    is_taken = np.zeros(num_seats, np.bool_)
    paid = np.zeros(num_blocks + 1, np.int64)
    block = 0
    while block >= 0:
        if seat[block] >= 0:
            is_taken[seat[block]] = False
        seat[block] += 1
        while seat[block] < num_seats and is_taken[seat[block]]:
            seat[block] += 1
        if seat[block] == num_seats:
            seat[block] = -1
            block -= 1
            continue
        is_taken[seat[block]] = True
        total = paid[block]
        for other in range(block):
            total += weight[block, other] * distance[seat[block], seat[other]]
        if total >= best:
            continue
        if block == num_blocks - 1:
            best = total
            continue
        block += 1
        paid[block] = total
    return best

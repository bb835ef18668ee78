"""Simulated annealing on a placement, to compare the planner with: slow, random, and free of the planner's own search.

Moves: two seats exchange what they hold, or two hosts of as many seats do. It starts from a given placement and cools
geometrically. Compiled by Numba, about ten million moves a minute on one core.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numba import njit

from hpc_train.plan.choose import choose_seats
from hpc_train.plan.seats import Edges, Seats, cost, find_edges, find_seats
from tests.plan.allocations import draw_problem

PROBLEMS = 20
_RUNS = 4
_TRIAL_MOVES = 200_000


def anneal_problem(seed: int, seconds: float) -> dict[str, Any]:
    """Anneal one of the problems of up to 64 nodes, from random placements and from the planner's.

    The runs take `seconds` of processor time together. The best of all counts; one entry says what annealing finds by
    itself.
    """
    problem = draw_problem(seed, nodes=(16, 32, 64))
    seats = find_seats(problem.mesh, problem.allocation, problem.fabric)
    edges = find_edges(problem.mesh, problem.traffic, int(seats.distance.max()))
    chosen = choose_seats(problem.mesh, seats, edges, problem.traffic, problem.fabric)
    anneal(seats, edges, chosen, 10, seed=0)
    start = time.process_time()
    anneal(seats, edges, chosen, _TRIAL_MOVES, seed=0)
    moves = int(_TRIAL_MOVES * seconds / _RUNS / (time.process_time() - start))
    anywhere = np.random.default_rng(seed).permutation(len(seats))[: len(chosen)]
    starts = [anywhere, anywhere, chosen, chosen]
    costs = [anneal(seats, edges, placed, moves, seed=run)[0] for run, placed in enumerate(starts)]
    planned = cost(seats, edges, chosen)
    return {
        "seed": seed,
        "nodes": problem.num_nodes,
        "mesh": problem.mesh.describe(),
        "processor_s": seconds,
        "moves_a_run": moves,
        "annealed": min(costs),
        "planned": planned,
        "planned_to_annealed": round(planned / min(costs), 4),
        "planned_to_annealed_from_random": round(planned / min(costs[:2]), 4),
    }


def anneal(seats: Seats, edges: Edges, seat_of_block: np.ndarray, num_moves: int, seed: int) -> tuple[int, np.ndarray]:
    """The best cost that was met, by the scale of the edges, and its placement."""
    num_blocks = len(seat_of_block)
    block = np.concatenate([edges.a, edges.b])
    order = np.argsort(block, kind="stable")
    other = np.concatenate([edges.b, edges.a])[order]
    weight = np.concatenate([edges.weight, edges.weight])[order]
    # Seats that stay empty hold units that send nothing.
    first = np.searchsorted(block[order], np.arange(len(seats) + 1))
    empty = np.setdiff1d(np.arange(len(seats)), seat_of_block)
    start = np.concatenate([seat_of_block, empty])
    first_seat = np.searchsorted(seats.host, np.arange(seats.num_hosts + 1))
    mean = float((edges.weight * seats.distance.max()).mean())
    best_cost, best = _anneal(
        start, first, other, weight.astype(np.float64), seats.host.astype(np.int64), seats.kind.astype(np.int64),
        seats.distance.astype(np.float64), first_seat, mean, mean / 300, num_moves, seed,
    )  # fmt: skip
    return round(best_cost), best[:num_blocks]


@njit(cache=True)
def _unit_cost(unit, seat, seat_of, first, other, weight, host, kind, distance):  # type: ignore[no-untyped-def]
    total = 0.0
    for end in range(first[unit], first[unit + 1]):
        there = seat_of[other[end]]
        if host[there] != host[seat]:
            total += weight[end] * distance[kind[there], kind[seat]]
    return total


@njit(cache=True)
def _total(seat_of, first, other, weight, host, kind, distance):  # type: ignore[no-untyped-def]
    total = 0.0
    for unit in range(len(seat_of)):
        total += _unit_cost(unit, seat_of[unit], seat_of, first, other, weight, host, kind, distance)
    return total / 2


@njit(cache=True)
def _swap(one, two, seat_of, unit_at, first, other, weight, host, kind, distance):  # type: ignore[no-untyped-def]
    """Exchange what two seats hold; the change of the cost."""
    a, b = unit_at[one], unit_at[two]
    before = _unit_cost(a, one, seat_of, first, other, weight, host, kind, distance)
    before += _unit_cost(b, two, seat_of, first, other, weight, host, kind, distance)
    seat_of[a], seat_of[b] = two, one
    unit_at[one], unit_at[two] = b, a
    after = _unit_cost(a, two, seat_of, first, other, weight, host, kind, distance)
    after += _unit_cost(b, one, seat_of, first, other, weight, host, kind, distance)
    # An edge between the two is counted twice before and twice after, and did not change.
    return after - before


@njit(cache=True)
def _anneal(  # type: ignore[no-untyped-def]
    start, first, other, weight, host, kind, distance, first_seat, hot, cold, num_moves, seed
):
    np.random.seed(seed)
    num_seats, num_hosts = len(start), len(first_seat) - 1
    seat_of = start.copy()
    unit_at = np.empty(num_seats, np.int64)
    for unit in range(num_seats):
        unit_at[seat_of[unit]] = unit
    now = _total(seat_of, first, other, weight, host, kind, distance)
    best, best_seat = now, seat_of.copy()
    cooling = (cold / hot) ** (1.0 / num_moves)
    heat = hot
    for _ in range(num_moves):
        heat *= cooling
        if num_hosts < num_seats and np.random.random() < 0.3:
            here, there = np.random.randint(num_hosts), np.random.randint(num_hosts)
            size = first_seat[here + 1] - first_seat[here]
            if here == there or size != first_seat[there + 1] - first_seat[there]:
                continue
            change = 0.0
            for slot in range(size):
                change += _swap(
                    first_seat[here] + slot, first_seat[there] + slot, seat_of, unit_at, first, other, weight, host,
                    kind, distance,
                )  # fmt: skip
            if change > 0 and np.random.random() >= np.exp(-change / heat):
                for slot in range(size):
                    _swap(
                        first_seat[here] + slot, first_seat[there] + slot, seat_of, unit_at, first, other, weight,
                        host, kind, distance,
                    )  # fmt: skip
            else:
                now += change
        else:
            one, two = np.random.randint(num_seats), np.random.randint(num_seats)
            if one == two:
                continue
            change = _swap(one, two, seat_of, unit_at, first, other, weight, host, kind, distance)
            if change > 0 and np.random.random() >= np.exp(-change / heat):
                _swap(one, two, seat_of, unit_at, first, other, weight, host, kind, distance)
            else:
                now += change
        if now < best - 0.5:
            best, best_seat = now, seat_of.copy()
    return _total(best_seat, first, other, weight, host, kind, distance), best_seat

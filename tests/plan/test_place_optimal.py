"""The planner finds what trying every placement finds: listed instances of up to 6 nodes, uneven ones too."""

from __future__ import annotations

import itertools

import pytest

from hpc_train.plan.axis_bytes import AxisTraffic
from hpc_train.plan.choose import choose_seats
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.seats import cost, find_edges, find_seats
from tests.plan.brute_force import lowest_cost
from tests.plan.fabrics import make_allocation, make_fabric

# Nodes of each leaf of each pod; ranks of each node; (pp, dp, cp, tp).
CASES = [
    ([[2, 2]], [4] * 4, [(4, 1, 1, 4), (2, 2, 1, 4), (1, 2, 2, 4)]),
    ([[1, 3]], [4] * 4, [(2, 2, 1, 4), (1, 4, 1, 4), (2, 4, 1, 2)]),
    ([[1, 2], [1]], [4] * 4, [(4, 1, 1, 4), (2, 1, 2, 4), (2, 2, 2, 2)]),
    ([[1, 1], [2]], [2] * 4, [(2, 2, 2, 1), (2, 4, 1, 1), (8, 1, 1, 1)]),
    ([[2, 3]], [8] * 5, [(5, 1, 1, 8), (1, 5, 1, 8), (5, 2, 1, 4)]),
    ([[2, 1], [2]], [8, 8, 8, 8, 8], [(5, 1, 1, 8), (1, 5, 1, 8)]),
    ([[3, 3]], [8] * 6, [(6, 1, 1, 8), (2, 3, 1, 8), (3, 2, 1, 8), (1, 3, 2, 8)]),
    ([[2, 2, 2]], [8] * 6, [(2, 3, 1, 8), (3, 2, 1, 8), (3, 1, 2, 8)]),
    ([[1, 2], [1, 2]], [8] * 6, [(2, 3, 1, 8), (3, 2, 1, 8), (6, 1, 1, 8)]),
    ([[1, 1, 1], [1, 1, 1]], [8] * 6, [(2, 3, 1, 8), (3, 1, 2, 8)]),
    # Uneven: nodes with fewer usable GPUs.
    ([[2, 1]], [4, 2, 2], [(2, 2, 1, 2), (4, 1, 1, 2), (2, 2, 2, 1)]),
    ([[1, 2], [1]], [4, 2, 4, 2], [(3, 2, 1, 2), (2, 3, 1, 2)]),
    ([[2, 2], [2]], [2, 1, 2, 1, 1, 2], [(3, 3, 1, 1), (9, 1, 1, 1)]),
    # More room than blocks.
    ([[2, 1], [2]], [4] * 5, [(2, 2, 1, 4), (1, 4, 1, 4)]),
    ([[1, 3], [2]], [8] * 6, [(5, 1, 1, 8), (1, 2, 2, 8)]),
]
INSTANCES = [
    (pods, tasks, mesh, sent, core)
    for (pods, tasks, meshes), (sent, core) in itertools.product(
        CASES, [((800, 3000, 2000), 1.0), ((3000, 700, 1500), 4.0)]
    )
    for mesh in meshes
]  # fmt: skip


def test_at_least_fifty_instances_are_listed_uneven_ones_among_them() -> None:
    assert len(INSTANCES) >= 50
    assert max(len(tasks) for _, tasks, *_ in INSTANCES) == 6
    assert sum(len({*tasks}) > 1 for _, tasks, *_ in INSTANCES) >= 10


@pytest.mark.parametrize("case", range(len(CASES)))
def test_no_placement_at_all_sends_fewer_byte_hops(case: int) -> None:
    chosen = [instance for instance in INSTANCES if instance[0] is CASES[case][0]]
    assert len(chosen) == 2 * len(CASES[case][2])
    for pods, tasks, axes, sent, core_oversubscription in chosen:
        mesh = Mesh(*axes)
        traffic = [
            AxisTraffic("pp", "line", sent[0] // 2, sent[0] // 2),
            AxisTraffic("dp", "ring", sent[1], 0),
            AxisTraffic("cp", "ring", sent[2], 0),
        ]
        fabric = make_fabric(pods, rails=8, core_oversubscription=core_oversubscription)
        seats = find_seats(mesh, make_allocation(list(fabric.nodes), tasks), fabric)
        edges = find_edges(mesh, traffic, int(seats.distance.max()))
        found = cost(seats, edges, choose_seats(mesh, seats, edges, traffic, fabric))
        assert found == lowest_cost(seats, edges, mesh.world_size // mesh.tp), (pods, tasks, axes, sent)

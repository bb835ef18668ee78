"""Who gets which place: tp inside nodes, near switches for the most bytes, orders by name, and what is refused."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.cluster.fabric import Fabric, FabricNode
from hpc_train.errors import ConfigError
from hpc_train.plan.axis_bytes import AxisTraffic
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.place import place
from hpc_train.plan.placement import Placement, slurm_placement
from hpc_train.plan.traffic import measure_traffic
from tests.plan.allocations import place_of
from tests.plan.fabrics import make_allocation, make_fabric

FIXED_ORDERS = ("tp,cp,dp,pp", "tp,cp,pp,dp")
TRAFFIC = (AxisTraffic("pp", "line", 400, 400), AxisTraffic("dp", "ring", 3000, 0), AxisTraffic("cp", "ring", 2000, 0))


def byte_hops(placement: Placement, fabric: Fabric, traffic: tuple[AxisTraffic, ...] = TRAFFIC) -> int:
    return measure_traffic(placement, fabric, traffic).byte_hops


def check(placement: Placement, tasks: dict[str, int], is_domain_wide: bool = False) -> None:
    """Every rank has a slot of its own that exists, and no tp group leaves its node."""
    places = [place_of(placement, rank) for rank in range(placement.mesh.world_size)]
    assert len({*places}) == placement.mesh.world_size
    assert all(0 <= slot < tasks[node] for node, slot in places)
    if not is_domain_wide:
        for group in placement.mesh.groups("tp"):
            assert len({places[rank][0] for rank in group}) == 1
    assert list(placement.nodes) == list(dict.fromkeys(node for node, _ in places))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Mesh, Fabric, dict[str, int]]:
    """A small fabric, some of its nodes with uneven ranks, and a mesh that they hold."""
    pods = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3))
    names = [f"n{index}" for index in range(sum(map(sum, pods)))]
    draw(st.randoms(use_true_random=False)).shuffle(names)
    over = draw(st.sampled_from([1.0, 4.0]))
    fabric = make_fabric(pods, names, draw(st.sampled_from([None, 4])), core_oversubscription=over)
    chosen = sorted(draw(st.lists(st.sampled_from(names), min_size=1, unique=True)))
    tasks = {node: draw(st.sampled_from([4, 4, 3, 2])) for node in chosen}
    tp = draw(st.sampled_from([1, 2]))
    blocks = sum(count // tp for count in tasks.values())
    pp = draw(st.sampled_from([degree for degree in range(1, blocks + 1) if blocks % degree == 0]))
    cp = draw(st.sampled_from([degree for degree in (1, 2, 4) if blocks // pp % degree == 0]))
    return Mesh(pp=pp, dp=blocks // pp // cp, cp=cp, tp=tp), fabric, tasks


@settings(max_examples=30, deadline=None)
@given(problems())
def test_any_allocation_is_placed_with_tp_inside_nodes_and_never_worse_than_the_known_orders(
    problem: tuple[Mesh, Fabric, dict[str, int]],
) -> None:
    mesh, fabric, tasks = problem
    allocation = make_allocation(list(tasks), list(tasks.values()))
    planned = place(mesh, allocation, fabric, TRAFFIC)
    check(planned, tasks)
    ours = byte_hops(planned, fabric)
    for order in FIXED_ORDERS:
        fixed = place(mesh, allocation, fabric, TRAFFIC, order)
        check(fixed, tasks)
        assert ours <= byte_hops(fixed, fabric)
    by_slurm = slurm_placement(mesh, allocation)
    # Where Slurm's order tears tp groups apart it sends less than is possible with whole ones, at times.
    whole = all(len({place_of(by_slurm, rank)[0] for rank in group}) == 1 for group in mesh.groups("tp"))
    assert not whole or ours <= byte_hops(by_slurm, fabric)


def test_the_same_input_gives_the_same_placement_whatever_the_order_of_the_fabric_s_tables() -> None:
    fabric = make_fabric([[3, 5], [4, 2]], rails=8)
    shuffled = list(fabric.nodes)
    random.Random(1).shuffle(shuffled)
    other = replace(fabric, nodes={name: fabric.nodes[name] for name in shuffled})
    allocation = make_allocation(sorted(fabric.nodes)[:12])
    mesh = Mesh(pp=2, dp=3, cp=2, tp=8)
    first, second = place(mesh, allocation, fabric, TRAFFIC), place(mesh, allocation, other, TRAFFIC)
    assert first.nodes == second.nodes
    assert np.array_equal(first.node_of_rank, second.node_of_rank)
    assert np.array_equal(first.gpu_of_rank, second.gpu_of_rank)


def test_nodes_interleaved_over_two_leaves_are_put_together_and_a_good_order_is_left_alone() -> None:
    mesh, ring = Mesh(pp=1, dp=4, cp=1, tp=8), (AxisTraffic("dp", "ring", 100, 0),)
    fabric = make_fabric([[2, 2]], names=["a", "c", "b", "d"], rails=8)
    found = place(mesh, make_allocation(["a", "b", "c", "d"]), fabric, ring)
    assert measure_traffic(found, fabric, ring).bytes_by_tier["spine"] == 2 * 8 * 100
    good = make_allocation(["a", "c", "b", "d"])
    found = place(mesh, good, fabric, ring)
    assert found.nodes == good.nodes
    assert any("Slurm's order is left alone" in note for note in found.notes)


@pytest.mark.parametrize(("dp_bytes", "near"), [(5000, "dp"), (50, "pp")])
def test_the_axis_with_more_bytes_gets_the_near_switches(dp_bytes: int, near: str) -> None:
    fabric = make_fabric([[4], [4], [4], [4]], rails=8)
    mesh = Mesh(pp=4, dp=4, cp=1, tp=8)
    traffic = (AxisTraffic("pp", "line", 400, 400), AxisTraffic("dp", "ring", dp_bytes, 0))
    found = place(mesh, make_allocation(list(fabric.nodes)), fabric, traffic)
    leaf = {node: entry.leaves for node, entry in fabric.nodes.items()}
    for group in mesh.groups(near):
        assert len({leaf[place_of(found, rank)[0]] for rank in group}) == 1


def test_peers_on_other_nodes_share_the_rail() -> None:
    fabric = make_fabric([[4, 4]], rails=8)
    mesh = Mesh(pp=2, dp=8, cp=1, tp=4)
    found = place(mesh, make_allocation(list(fabric.nodes)), fabric, TRAFFIC)
    for axis in ("pp", "dp"):
        for group in mesh.groups(axis):
            for rank, other in itertools.pairwise(group):
                (node, slot), (other_node, other_slot) = place_of(found, rank), place_of(found, other)
                assert node == other_node or slot == other_slot


def test_orders_by_name_nest_the_axes_over_nodes_sorted_by_switch() -> None:
    fabric = make_fabric([[2, 2], [2, 2]], names=["h", "a", "g", "b", "f", "c", "e", "d"])
    by_switch = ["a", "h", "b", "g", "c", "f", "d", "e"]
    allocation = make_allocation(sorted(fabric.nodes), 2)
    mesh = Mesh(pp=2, dp=4, cp=1, tp=2)
    megascale = place(mesh, allocation, fabric, TRAFFIC, "tp,dp,pp")
    assert list(megascale.nodes) == by_switch
    llama = place(mesh, allocation, fabric, TRAFFIC, "tp,cp,pp,dp")
    assert [place_of(llama, mesh.rank_of(pp=stage, dp=replica))[0] for replica in range(4) for stage in range(2)] == (
        by_switch
    )
    assert place(mesh, allocation, fabric, TRAFFIC, "slurm").nodes == allocation.nodes


def test_a_tp_group_larger_than_a_node_needs_an_nvlink_domain() -> None:
    names = [f"n{index}" for index in range(8)]
    nodes = {name: FabricNode(name, ("p0l0",), nvlink_domain=f"rack{at // 4}") for at, name in enumerate(names)}
    fabric = replace(make_fabric([[8]]), nodes=nodes)
    mesh = Mesh(pp=1, dp=2, cp=1, tp=16)
    found = place(mesh, make_allocation(names, 4), fabric, TRAFFIC)
    check(found, dict.fromkeys(names, 4), is_domain_wide=True)
    for group in mesh.groups("tp"):
        assert len({nodes[place_of(found, rank)[0]].nvlink_domain for rank in group}) == 1
    with pytest.raises(ConfigError, match=r"tp=16 does not fit into a node.*has 4 ranks.*Use tp=1 or 2 or 4"):
        place(mesh, make_allocation(names, 4), make_fabric([[8]], names), TRAFFIC)


def test_uneven_nodes_that_tear_tp_groups_are_refused_with_what_would_fit() -> None:
    allocation = make_allocation(["n0", "n1", "n2"], [4, 3, 5])
    with pytest.raises(ConfigError, match=r"needs 6 tp groups of 2.*hold 5.*n1 \(3\), n2 \(5\).*Use tp=1"):
        place(Mesh(pp=1, dp=6, cp=1, tp=2), allocation, make_fabric([[3]]), TRAFFIC)


def test_failed_links_and_excluded_nodes_are_respected() -> None:
    fabric = make_fabric([[3, 3]], rails=4)
    names = list(fabric.nodes)
    dead = FabricNode("n0", (None,) * 4)
    one_rail = FabricNode("n4", ("p0l1r0", None, "p0l1r2", "p0l1r3"))
    fabric = replace(fabric, nodes={**fabric.nodes, "n0": dead, "n4": one_rail})
    mesh, allocation = Mesh(pp=1, dp=5, cp=1, tp=4), make_allocation(names, 4)
    with pytest.raises(ConfigError, match=r"no link of node n0 works.*fabric\.exclude=n0"):
        place(mesh, allocation, fabric, TRAFFIC)
    found = place(mesh, allocation, fabric, TRAFFIC, exclude={"n0"})
    check(found, dict.fromkeys(names[1:], 4))
    assert any("links are down on n4" in note for note in found.notes)
    # With a node to spare, the one with a broken rail stays empty.
    spare = place(Mesh(pp=1, dp=4, cp=1, tp=4), allocation, fabric, TRAFFIC, exclude={"n0"})
    assert "n4" not in spare.nodes
    with pytest.raises(ConfigError, match="needs 6 tp groups of 4"):
        place(Mesh(pp=1, dp=6, cp=1, tp=4), allocation, fabric, TRAFFIC, exclude={"n0"})


def test_without_a_fabric_it_is_slurm_s_order_and_one_that_was_asked_for_is_told() -> None:
    for order, notes in (("auto", ()), ("tp,dp,pp,cp", ("the order tp,dp,pp,cp has no effect without a fabric",))):
        found = place(Mesh(pp=1, dp=2, cp=1, tp=4), make_allocation(["b", "a"], 4), None, TRAFFIC, order)
        assert (found.nodes, found.order, found.notes) == (("b", "a"), "slurm", notes)


@pytest.mark.parametrize("order", ["auto", "slurm"])
def test_a_tp_group_that_does_not_fit_into_a_node_is_refused_without_a_fabric_too(order: str) -> None:
    with pytest.raises(ConfigError, match=r"tp=4 does not fit into a node.*has 2 ranks.*No fabric is.*Use tp=1 or 2"):
        place(Mesh(pp=1, dp=1, cp=1, tp=4), make_allocation(["n1", "n2"], 2), None, TRAFFIC, order)
    with pytest.raises(ConfigError, match=r"2 tp groups of 3.*hold 1.*b \(4\), a \(2\)"):
        place(Mesh(pp=1, dp=2, cp=1, tp=3), make_allocation(["b", "a"], [4, 2]), None, TRAFFIC, order)


def test_slurm_s_order_is_refused_where_it_spreads_a_tp_group_that_another_order_would_not() -> None:
    mesh, uneven = Mesh(pp=1, dp=2, cp=1, tp=2), make_allocation(["n0", "n1", "n2"], [1, 2, 2])
    with pytest.raises(ConfigError, match=r"in Slurm's order 2 of 2 tp groups .* Use fabric\.order=auto"):
        place(mesh, uneven, make_fabric([[3]]), TRAFFIC, "slurm")
    assert place(mesh, uneven, make_fabric([[3]]), TRAFFIC).nodes == ("n1", "n2")


@pytest.mark.parametrize("order", ["tp,dp", "dp,tp,pp", "tp,tp,pp,dp", "tp,ep,dp,pp", "fast"])
def test_an_order_that_is_none_is_refused(order: str) -> None:
    with pytest.raises(ConfigError, match="is not an order of the axes"):
        place(Mesh(pp=2, dp=2, cp=1, tp=2), make_allocation(["n0"]), make_fabric([[1]]), TRAFFIC, order)


def test_a_single_tp_group_takes_a_place() -> None:
    found = place(Mesh(pp=1, dp=1, cp=1, tp=2), make_allocation(["n1"], 3), make_fabric([[1, 1]]), TRAFFIC)
    check(found, {"n1": 3})


def test_a_fabric_without_an_allocated_node_is_refused() -> None:
    with pytest.raises(ConfigError, match="from test has no node x7"):
        place(Mesh(pp=1, dp=2, cp=1, tp=8), make_allocation(["n0", "x7"]), make_fabric([[2]]), TRAFFIC)


def test_bytes_of_very_large_models_do_not_overflow() -> None:
    fabric = make_fabric([[8, 8], [8, 8]], rails=8, core_oversubscription=7.0)
    huge = (AxisTraffic("pp", "line", 10**13, 10**13), AxisTraffic("dp", "ring", 3 * 10**15, 0))
    mesh = Mesh(pp=4, dp=8, cp=1, tp=8)
    found = place(mesh, make_allocation(list(fabric.nodes)), fabric, huge)
    assert (
        0
        < byte_hops(found, fabric, huge)
        <= byte_hops(slurm_placement(mesh, make_allocation(list(fabric.nodes))), fabric, huge)
    )

"""Bytes by tier, byte-hops and uplinks, counted by hand and once more by the fabric's own rule, pair by pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpc_train.cluster.fabric import FabricNode
from hpc_train.errors import ConfigError
from hpc_train.plan.axis_bytes import AxisTraffic
from hpc_train.plan.mesh import AXES, Mesh
from hpc_train.plan.placement import Placement, slurm_placement
from hpc_train.plan.traffic import measure_traffic, route, transfers
from tests.plan.allocations import place_of
from tests.plan.fabrics import make_allocation, make_fabric

RING = AxisTraffic("dp", "ring", 100, 0)


def test_four_nodes_interleaved_over_two_leaves_cross_the_spine_four_times_in_a_ring_and_twice_when_sorted() -> None:
    fabric = make_fabric([[2, 2]], names=["a", "c", "b", "d"])
    mesh = Mesh(pp=1, dp=4, cp=1, tp=8)
    interleaved = measure_traffic(slurm_placement(mesh, make_allocation(["a", "b", "c", "d"])), fabric, [RING])
    by_switch = measure_traffic(slurm_placement(mesh, make_allocation(["a", "c", "b", "d"])), fabric, [RING])
    assert interleaved.bytes_by_tier == {"node": 0, "leaf": 0, "spine": 4 * 8 * 100, "core": 0}
    assert by_switch.bytes_by_tier == {"node": 0, "leaf": 2 * 8 * 100, "spine": 2 * 8 * 100, "core": 0}
    assert interleaved.byte_hops == 4 * 8 * 100 * 3
    assert by_switch.byte_hops == 2 * 8 * 100 * 3 + 2 * 8 * 100


@pytest.mark.parametrize(
    ("entry", "sent"),
    [
        (AxisTraffic("pp", "ring", 7, 0), {(0, 1): 7, (1, 2): 7, (2, 0): 7}),
        (AxisTraffic("pp", "line", 7, 5), {(0, 1): 7, (1, 2): 7, (1, 0): 5, (2, 1): 5}),
        (AxisTraffic("pp", "line", 7, 5, 2), {(0, 1): 7, (1, 2): 7, (1, 0): 5, (2, 1): 5, (0, 2): 2, (2, 0): 2}),
        (AxisTraffic("pp", "wrap", 7, 5), {(0, 1): 7, (1, 2): 7, (1, 0): 5, (2, 1): 5, (2, 0): 7, (0, 2): 5}),
    ],
)
def test_patterns_say_who_sends_what(entry: AxisTraffic, sent: dict[tuple[int, int], int]) -> None:
    listed = transfers(Mesh(pp=3, dp=1, cp=1, tp=1), [entry])
    found = zip(listed.sender.tolist(), listed.receiver.tolist(), listed.num_bytes.tolist(), strict=True)
    assert {(sender, receiver): num_bytes for sender, receiver, num_bytes in found} == sent


@pytest.mark.parametrize("rails", [None, 4])
def test_every_transfer_is_counted_on_the_tier_that_the_fabric_says(rails: int | None) -> None:
    fabric = make_fabric([[2, 3], [1, 2]], rails=rails, spine_oversubscription=1.5, core_oversubscription=4.0)
    mesh = Mesh(pp=2, dp=4, cp=2, tp=2)
    traffic = [
        AxisTraffic("pp", "wrap", 11, 13),
        AxisTraffic("dp", "ring", 101, 0),
        AxisTraffic("cp", "ring", 53, 0),
        AxisTraffic("tp", "ring", 997, 0),
    ]
    shuffled = np.random.default_rng(3).permutation(32)
    placement = Placement(mesh, tuple(fabric.nodes), shuffled // 4, shuffled % 4, "auto")
    expected = dict.fromkeys(("node", "leaf", "spine", "core"), 0)
    for entry in traffic:
        for group in mesh.groups(entry.axis):
            for position, rank in enumerate(group):
                for other, num_bytes in ((position + 1, entry.forward_bytes), (position - 1, entry.backward_bytes)):
                    if entry.pattern == "line" and not 0 <= other < len(group):
                        continue
                    here, there = place_of(placement, rank), place_of(placement, group[other % len(group)])
                    expected[fabric.tier(*here, *there)] += num_bytes
    found = measure_traffic(placement, fabric, traffic)
    assert found.bytes_by_tier == expected
    assert found.byte_hops == int(expected["leaf"] + expected["spine"] * 4.5 + expected["core"] * 20)
    assert set(AXES) == {entry.axis for entry in traffic}


def test_the_busiest_uplink_is_the_one_that_takes_longest_and_says_how_long() -> None:
    links = {f"p{pod}l{leaf}r{rail}": 2 for pod in range(2) for leaf in range(2) for rail in range(2)}
    fabric = make_fabric(
        [[1, 1], [1, 1]],
        rails=2,
        leaf_uplinks={**links, "p1l0r1": 1},
        pod_uplinks={"p0": 8, "p1": 8},
        link_bytes_per_s={"leaf": 100, "spine": 50, "core": 50},
    )
    placement = slurm_placement(Mesh(pp=1, dp=4, cp=1, tp=2), make_allocation(list(fabric.nodes), 2))
    found = measure_traffic(placement, fabric, [RING])
    assert found.busiest_uplink is not None
    assert (found.busiest_uplink.name, found.busiest_uplink.num_bytes) == ("p1l0r1 rail 1", 100)
    assert found.busiest_uplink.seconds == 100 / 50
    by_name = {uplink.name: uplink for uplink in route(placement, fabric, [RING]).uplinks(fabric)}
    assert by_name["p0"].up_bytes == by_name["p0"].down_bytes == 2 * 100
    unknown = measure_traffic(placement, make_fabric([[1, 1], [1, 1]]), [RING])
    assert unknown.busiest_uplink is not None
    assert unknown.busiest_uplink.seconds is None


def test_ranks_without_a_working_link_of_their_rail_use_the_nearest_rail_and_pay_the_spine() -> None:
    placement = slurm_placement(Mesh(pp=1, dp=2, cp=1, tp=4), make_allocation(["n0", "n1"], 4))
    for rails, broken in (
        (4, FabricNode("n1", ("p0l0r0", None, "p0l0r2", "p0l0r3"))),
        (None, FabricNode("n1", ("p0l0",), down_rails=(1,))),
    ):
        fabric = make_fabric([[2]], rails=rails)
        fabric = replace(fabric, nodes={**fabric.nodes, "n1": broken})
        by_tier = measure_traffic(placement, fabric, [RING]).bytes_by_tier
        assert by_tier == {"node": 0, "leaf": 600, "spine": 200, "core": 0}
        assert any("links are down on n1" in note for note in route(placement, fabric, [RING]).places.notes)
    fabric = replace(fabric, nodes={**fabric.nodes, "n1": FabricNode("n1", (None,) * 4)})
    with pytest.raises(ConfigError, match=r"no link of node n1 works.*fabric\.exclude=n1"):
        measure_traffic(placement, fabric, [RING])


def test_nodes_of_one_nvlink_domain_need_no_switch() -> None:
    nodes = {name: FabricNode(name, ("p0l0",), nvlink_domain="rack") for name in ("n0", "n1")}
    fabric = replace(make_fabric([[2]]), nodes=nodes)
    placement = slurm_placement(Mesh(pp=1, dp=2, cp=1, tp=4), make_allocation(["n0", "n1"], 4))
    assert measure_traffic(placement, fabric, [RING]).byte_hops == 0


def test_a_fabric_that_does_not_fit_the_placement_is_refused() -> None:
    placement = slurm_placement(Mesh(pp=1, dp=2, cp=1, tp=4), make_allocation(["n0", "x9"], 4))
    with pytest.raises(ConfigError, match="from test has no node x9"):
        measure_traffic(placement, make_fabric([[2]]), [RING])
    placement = slurm_placement(Mesh(pp=1, dp=2, cp=1, tp=4), make_allocation(["n0", "n1"], 4))
    with pytest.raises(ConfigError, match="a GPU of n0 takes rail 2"):
        measure_traffic(placement, make_fabric([[2]], rails=2), [RING])


def test_slurm_order_fills_uneven_nodes_one_after_another_and_leaves_out_what_is_excluded() -> None:
    allocation = make_allocation(["n0", "n1", "n2"], [3, 1, 4])
    placement = slurm_placement(Mesh(pp=1, dp=8, cp=1, tp=1), allocation)
    assert [place_of(placement, rank) for rank in (0, 2, 3, 4, 7)] == [
        ("n0", 0), ("n0", 2), ("n1", 0), ("n2", 0), ("n2", 3),
    ]  # fmt: skip
    assert slurm_placement(Mesh(pp=1, dp=7, cp=1, tp=1), allocation, {"n1"}).nodes == ("n0", "n2")
    with pytest.raises(ConfigError, match="needs 8 ranks, but 2 nodes of the allocation have 7, 1 being excluded"):
        slurm_placement(Mesh(pp=1, dp=8, cp=1, tp=1), allocation, {"n1"})

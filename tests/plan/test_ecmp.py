"""Hashed loads against an even spread and a plain count, and the settings that follow from a placement."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hpc_train.cluster.fabric_clos import clos_fabric
from hpc_train.plan.axis_bytes import AxisTraffic
from hpc_train.plan.ecmp import estimate_ecmp
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.nccl_settings import NcclSetting, nccl_settings, unset
from hpc_train.plan.place import place
from hpc_train.plan.placement import Placement, slurm_placement
from tests.plan.allocations import place_of
from tests.plan.fabrics import make_allocation, make_fabric

RING = (AxisTraffic("dp", "ring", 1000, 0),)
FABRIC = clos_fabric("clos:pods=2,nodes=64,ports=32,shuffle=3")
MESH = Mesh(pp=4, dp=16, cp=1, tp=8)
ALLOCATION = make_allocation(sorted(FABRIC.nodes)[:64])
TRAFFIC = (AxisTraffic("pp", "line", 400, 400), AxisTraffic("dp", "ring", 3000, 0))


def test_the_plan_meets_on_fewer_links_than_slurm_s_order() -> None:
    planned = estimate_ecmp(place(MESH, ALLOCATION, FABRIC, TRAFFIC), FABRIC, TRAFFIC)
    by_slurm = estimate_ecmp(slurm_placement(MESH, ALLOCATION), FABRIC, TRAFFIC)
    assert planned.expected_s is not None and by_slurm.expected_s is not None
    assert planned.expected_s < by_slurm.expected_s
    assert sum(uplink.num_bytes for uplink in planned.uplinks) < sum(uplink.num_bytes for uplink in by_slurm.uplinks)


def test_every_byte_that_climbs_is_on_a_link_and_bounds_hold() -> None:
    placement = slurm_placement(MESH, ALLOCATION)
    found = estimate_ecmp(placement, FABRIC, TRAFFIC, flows_a_pair=3)
    for uplink in found.uplinks:
        even = math.ceil(uplink.num_bytes / uplink.num_links)
        assert even <= uplink.worst_bytes <= uplink.num_bytes
        assert uplink.expected_bytes <= uplink.worst_bytes
        assert 1 <= uplink.expected_collision <= uplink.worst_collision <= uplink.num_links
    # Leaf uplinks carry what climbs to the spine or the core: counted once more, pair by pair.
    climbed = 0
    for entry in TRAFFIC:
        for group in MESH.groups(entry.axis):
            for position, rank in enumerate(group):
                for other, sent in ((position + 1, entry.forward_bytes), (position - 1, entry.backward_bytes)):
                    if entry.pattern == "line" and not 0 <= other < len(group):
                        continue
                    ends = place_of(placement, rank), place_of(placement, group[other % len(group)])
                    climbed += sent if FABRIC.tier(*ends[0], *ends[1]) in ("spine", "core") else 0
    assert sum(uplink.num_bytes for uplink in found.uplinks if uplink.tier == "spine") == climbed


def test_the_expected_busiest_link_is_that_of_balls_thrown_into_bins() -> None:
    """64 equal flows on 16 links: the mean maximum of a multinomial, by a simulation that shares no code."""
    links = {f"p0l{leaf}r{rail}": 16 for leaf in range(2) for rail in range(1)}
    fabric = make_fabric([[64, 64]], rails=1, leaf_uplinks=links)
    nodes = [name for pair in zip(list(fabric.nodes)[:64], list(fabric.nodes)[64:], strict=True) for name in pair]
    mesh = Mesh(pp=1, dp=128, cp=1, tp=1)
    placement = Placement(mesh, tuple(nodes), np.arange(128), np.zeros(128, np.int32), "auto")
    found = estimate_ecmp(placement, fabric, RING, seeds=range(300))
    draws = np.random.default_rng(1).multinomial(64, [1 / 16] * 16, size=20000).max(axis=1).mean() * 1000
    assert [uplink.num_bytes for uplink in found.uplinks] == [64 * 1000] * 2
    for uplink in found.uplinks:
        # The standard error of 300 seeds is about 0.07 flows of 1000 bytes.
        assert abs(uplink.expected_bytes - draws) < 350


def test_seeds_decide_alone_and_more_flows_spread_better() -> None:
    placement = slurm_placement(MESH, ALLOCATION)
    once = estimate_ecmp(placement, FABRIC, TRAFFIC, seeds=[7])
    assert once == estimate_ecmp(placement, FABRIC, TRAFFIC, seeds=[7])
    assert once != estimate_ecmp(placement, FABRIC, TRAFFIC, seeds=[8])
    few, many = (estimate_ecmp(placement, FABRIC, TRAFFIC, flows_a_pair=count) for count in (1, 16))
    assert many.expected_collision < few.expected_collision
    with pytest.raises(ValueError, match="at least one of each"):
        estimate_ecmp(placement, FABRIC, TRAFFIC, flows_a_pair=0)


def test_uplinks_of_unknown_links_are_left_out() -> None:
    fabric = make_fabric([[2, 2]], rails=8)
    found = estimate_ecmp(slurm_placement(Mesh(pp=1, dp=4, cp=1, tp=8), make_allocation([*fabric.nodes])), fabric, RING)
    assert (found.uplinks, found.expected_s) == ((), None)
    assert found.expected_collision == found.worst_collision == 1.0


def test_rail_aligned_rings_keep_to_their_cards_and_others_are_left_alone() -> None:
    settings = {entry.name: entry for entry in nccl_settings(place(MESH, ALLOCATION, FABRIC, TRAFFIC), FABRIC, TRAFFIC)}
    assert settings["NCCL_CROSS_NIC"].value == "0"
    assert (settings["NCCL_IB_TIMEOUT"].value, settings["NCCL_IB_RETRY_CNT"].value) == ("22", "7")
    assert "17 s are waited for each of 7 tries, 120 s in all" in settings["NCCL_IB_TIMEOUT"].reason
    assert int(settings["NCCL_IB_QPS_PER_CONNECTION"].value) > 1
    turned = Mesh(pp=1, dp=4, cp=1, tp=1)
    crossing = Placement(turned, tuple([*FABRIC.nodes][:2]), np.array([0, 0, 1, 1]), np.array([0, 1, 2, 3]), "auto")
    assert "NCCL_CROSS_NIC" not in {entry.name for entry in nccl_settings(crossing, FABRIC, RING)}


def test_nothing_is_wanted_without_a_fabric_or_on_one_node_and_nothing_that_the_user_has_set() -> None:
    placement = slurm_placement(Mesh(pp=1, dp=8, cp=1, tp=1), make_allocation(["n000"]))
    assert nccl_settings(placement, None, RING) == ()
    assert nccl_settings(placement, FABRIC, RING) == ()
    wanted = (NcclSetting("NCCL_CROSS_NIC", "0", "why"), NcclSetting("NCCL_IB_TIMEOUT", "22", "why"))
    assert unset(wanted, {"NCCL_IB_TIMEOUT": "20"}) == wanted[:1]

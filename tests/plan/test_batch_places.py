"""Rings along the placement: neighbours of a ring are near each other in the network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpc_train.cluster.fabric_clos import clos_fabric
from hpc_train.errors import LaunchError
from hpc_train.plan.axis_bytes import AxisTraffic
from hpc_train.plan.batch_balanced import BalancedPlanner
from hpc_train.plan.batch_cost import BatchCosts
from hpc_train.plan.batch_of_run import batches_of_plan
from hpc_train.plan.batch_places import hdp_places
from hpc_train.plan.batch_problem import BatchProblem, HdpRanks
from hpc_train.plan.batch_table import BatchTable
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.place import place
from hpc_train.plan.run import Plan
from tests.plan.fabrics import make_allocation
from tests.plan.reports import make_config, make_report
from tests.plan.ring_traffic import ring_bytes_by_tier, ring_edges

COSTS = BatchCosts(attention_per_square=1, linear_per_token=24576, ring_per_token=5560)


def placed(num_nodes: int, tp: int = 1, pp: int = 1):
    """Half of the nodes of two pods, whose leaf sets have 8 nodes each, with names off the switches."""
    fabric = clos_fabric(f"clos:pods=2,nodes={num_nodes},ports=16,shuffle=1")
    names = sorted(fabric.nodes)[::2][:num_nodes]
    mesh = Mesh.fill(num_nodes * 8, pp=pp, cp=1, tp=tp)
    traffic = [AxisTraffic("dp", "ring", 1000, 0), AxisTraffic("pp", "line", 10, 10)]
    return place(mesh, make_allocation(names), fabric, traffic), fabric


def plan_on(places, lengths, capacity=1024) -> BatchTable:
    ranks = HdpRanks.make([capacity] * len(places[0]), None, places)
    return BalancedPlanner(grows_rings=False).plan(BatchProblem.make(0, lengths, ranks, COSTS))


def shuffled(table: BatchTable, seed: int = 0) -> BatchTable:
    """The same rings with their members in a random order."""
    rng, ranks = np.random.default_rng(seed), table.ranks.copy()
    for start, stop in zip(table.first_rank[:-1], table.first_rank[1:], strict=True):
        rng.shuffle(ranks[start:stop])
    return replace(table, ranks=ranks)


def leaving(bytes_by_tier) -> int:
    return bytes_by_tier["spine"] + bytes_by_tier["core"]


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (8, 1), (2, 2)])
def test_rings_send_little_out_of_a_leaf(tp, pp):
    placement, fabric = placed(16, tp, pp)
    places = hdp_places(placement, fabric)
    lengths = [1024 * size for size in (60, 33, 20, 12, 16, 9, 6, 8, 2) if size <= len(places[0])]
    table = plan_on(places, lengths)
    ours = ring_bytes_by_tier(table, placement, fabric, 4)
    arbitrary = ring_bytes_by_tier(shuffled(table), placement, fabric, 4)
    assert sum(ours.values()) == sum(arbitrary.values()) > 0
    assert leaving(ours) <= 0.5 * leaving(arbitrary)


def test_a_ring_over_whole_nodes_of_a_leaf_leaves_each_node_by_a_rail_that_the_next_one_has():
    placement, fabric = placed(16)
    order, host, port = hdp_places(placement, fabric)
    table = plan_on((order, host, port), [1024 * 32])
    members = table.ranks[: table.first_rank[1]].tolist()
    assert len(members) == 32
    hops = [(a, b) for a, b in zip(members, members[1:] + members[:1], strict=True) if host[a] != host[b]]
    assert len(hops) == len({host[member] for member in members}) == 4
    groups = {int(port[member]) for member in members}
    if len(groups) == 8:  # one leaf of each rail
        assert all(port[a] == port[b] for a, b in hops)


@pytest.mark.parametrize("sizes", [[3, 8, 8, 2], [1, 1, 1], [8, 1, 8], [2, 2], [5], [8, 8, 8, 8, 8], [1, 8], [4, 3]])
def test_the_way_round_a_ring_passes_each_member_once_and_changes_hosts_on_one_port(sizes):
    from hpc_train.plan.batch_list_kernels import lay_rings

    hosts = np.repeat(np.arange(len(sizes)), sizes)
    # The first host lacks low rails, as where a ring begins in the middle of a node; others lack high ones.
    ports = np.concatenate([np.arange(8 - size if number == 0 else 0, 8)[:size] for number, size in enumerate(sizes)])
    way = np.arange(len(hosts))
    lay_rings(np.array([0, len(hosts)]), hosts, ports, way)
    assert sorted(way.tolist()) == list(range(len(hosts)))
    ring = [(int(hosts[at]), int(ports[at])) for at in way]
    crossings = [(a, b) for a, b in zip(ring, ring[1:] + ring[:1], strict=True) if a[0] != b[0]]
    assert len(crossings) == (len(sizes) if len(sizes) > 1 else 0)
    changed = sum(a[1] != b[1] for a, b in crossings)
    shared = [{*ports[hosts == a]} & {*ports[hosts == (a + 1) % len(sizes)]} for a in range(len(sizes))]
    hopeless = sum(not common for common in shared) if len(sizes) > 1 else 0
    # Where hosts have one rank, or share one rail alone, one change more cannot be helped.
    assert changed <= hopeless + 1
    if min(sizes) == 8:
        assert changed == 0


def test_edges_carry_what_a_ring_passes():
    table = plan_on(tuple(np.arange(4) for _ in range(3)), [4096, 1000])
    sender, receiver, tokens = ring_edges(table)
    assert sorted(zip(sender.tolist(), receiver.tolist(), strict=True)) == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert tokens.tolist() == [3072] * 4


def test_ranks_and_agents_plan_with_what_plan_json_says_of_hdp_ranks() -> None:
    """A run's plan, read back, gives the setup that `plan --batch` uses; one made without parallel.hdp is refused."""
    config = make_config({"tp": 2, "hdp": {"capacity_tokens": 128}})
    report = make_report(config=config)
    plan = Plan.from_json(report.plan.to_json())
    found = batches_of_plan(config, plan)
    assert found is not None and report.fabric is not None
    order, host, port = hdp_places(report.placement, report.fabric)
    assert found.ranks.order.tolist() == order.tolist()
    assert (found.ranks.host.tolist(), found.ranks.port.tolist()) == (host.tolist(), port.tolist())
    assert batches_of_plan(make_config(), plan) is None
    with pytest.raises(LaunchError, match="says nothing of hdp ranks"):
        batches_of_plan(config, make_report().plan)
    without = make_report(None, config=config).plan
    assert without.further["hdp"]["nodes"] == [f"n{rank // 4}" for rank in range(32)]

"""Who keeps whose copy: one each, never its own, outside leaf and groups wherever that can be."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.cluster.fabric import Fabric
from hpc_train.plan import peer_copies
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.peer_copies import plan_peer_copies
from hpc_train.plan.placement import Placement, make_placement
from tests.plan.fabrics import make_fabric


def _placed(mesh: Mesh, ranks_per_node: int, names: list[str] | None = None) -> Placement:
    """Rank after rank over the nodes."""
    node, slot = np.divmod(np.arange(mesh.world_size), ranks_per_node)
    names = names or [f"n{index}" for index in range(int(node[-1]) + 1)]
    return make_placement(mesh, tuple(names), node, slot, "slurm")


def _coords(placement: Placement, node: int) -> list[dict[str, int]]:
    return [placement.mesh.coords(rank) for rank in np.flatnonzero(placement.node_of_rank == node).tolist()]


def _share(placement: Placement, axis: str, node: int, other: int) -> bool:
    """By the definition: some rank here and some there differ in no other coordinate."""
    return any(
        all(here[name] == there[name] for name in here if name != axis)
        for here in _coords(placement, node)
        for there in _coords(placement, other)
    )


@st.composite
def _problems(draw: st.DrawFn) -> tuple[Placement, Fabric | None]:
    tp, cp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    mesh = Mesh(pp=draw(st.integers(1, 4)), dp=draw(st.integers(1, 5)), cp=cp, tp=tp)
    ranks_per_node = draw(st.sampled_from([tp, 2 * tp, 3 * tp]))
    num_nodes = -(-mesh.world_size // ranks_per_node)
    leaves = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    names = [f"n{index}" for index in range(max(num_nodes, sum(leaves)))]
    leaves += [1] * (len(names) - sum(leaves))
    fabric = make_fabric([leaves], names, draw(st.sampled_from([None, 2])))
    used = draw(st.permutations(names))[:num_nodes]
    return _placed(mesh, ranks_per_node, used), draw(st.sampled_from([fabric, None]))


@settings(max_examples=150, deadline=None)
@given(_problems())
def test_each_node_keeps_one_other_node_s_copy_and_as_few_as_can_be_stay_in_their_leaf(problem) -> None:
    placement, fabric = problem
    holder = plan_peer_copies(placement, fabric).holder
    count = len(placement.nodes)
    if count == 1:
        assert holder == ()
        return
    assert sorted(holder) == list(range(count)) and all(node != other for node, other in enumerate(holder))
    if fabric is not None:
        leaves = [fabric.nodes[node].leaves[0] for node in placement.nodes]
        within = sum(leaves[node] == leaves[other] for node, other in enumerate(holder))
        assert within == max(0, 2 * max(Counter(leaves).values()) - count)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(2, 6), st.sampled_from([1, 2]), st.sampled_from([2, 4]))
def test_a_grid_of_nodes_keeps_all_copies_outside_its_groups(pp: int, dp: int, cp: int, tp: int) -> None:
    placement = _placed(Mesh(pp=pp, dp=dp, cp=cp, tp=tp), cp * tp)
    planned = plan_peer_copies(placement, None)
    for node, other in enumerate(planned.holder):
        assert not any(_share(placement, axis, node, other) for axis in ("pp", "dp", "cp", "tp"))
    assert planned.notes == ()


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 7])
@pytest.mark.parametrize("axis", ["pp", "dp"])
def test_where_all_nodes_are_of_one_group_the_plan_says_so(num_nodes: int, axis: str) -> None:
    placement = _placed(Mesh(**{"pp": 1, "dp": 1, "cp": 1, "tp": 2, axis: num_nodes}), 2)
    planned = plan_peer_copies(placement, None)
    if num_nodes == 1:
        assert planned.holder == () and planned.notes == (
            "copies are kept on the one node that there is, and are lost with it",
        )
        return
    assert sorted(planned.holder) == list(range(num_nodes))
    (note,) = planned.notes
    assert note.startswith(f"the copies of {num_nodes} of {num_nodes} nodes, n0 first") and f"same {axis} group" in note


def test_a_leaf_with_most_nodes_is_named() -> None:
    fabric = make_fabric([[3, 1]])
    planned = plan_peer_copies(_placed(Mesh(pp=2, dp=2, cp=1, tp=2), 2), fabric)
    assert "the copies of 2 of 4 nodes" in planned.notes[0] and "3 of the nodes hang on one leaf" in planned.notes[0]


def test_both_leaf_and_groups_are_left_where_that_can_be() -> None:
    # Leaves of one pipeline stage each: another leaf alone would leave the copy in the pp group.
    fabric = make_fabric([[4, 4, 4, 4]])
    placement = _placed(Mesh(pp=4, dp=4, cp=1, tp=8), 8)
    planned = plan_peer_copies(placement, fabric)
    assert planned.notes == ()
    for node, other in enumerate(planned.holder):
        assert node // 4 != other // 4 and node % 4 != other % 4


def test_the_work_grows_with_the_nodes_and_not_with_their_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: Counter[int] = Counter()
    cost = peer_copies._Nodes.cost

    def counted(nodes: peer_copies._Nodes, node: int, other: int) -> int:
        pairs[nodes.count] += 1
        return cost(nodes, node, other)

    monkeypatch.setattr(peer_copies._Nodes, "cost", counted)
    for dp, pods in ((32, 1), (256, 8)):
        placement = _placed(Mesh(pp=8, dp=dp, cp=1, tp=8), 8)
        planned = plan_peer_copies(placement, make_fabric([[32] * 8] * pods))
        assert planned.notes == () and len(planned.holder) == 8 * dp
    assert pairs[2048] <= 10 * pairs[256]

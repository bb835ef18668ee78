"""What is whole on the nodes at hand: every part of one save, on its own node or elsewhere; and who reads which."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.plan.local_sets import BrokenSet, FoundPart, WholeSet, choose_sets


def _kept(num_nodes: int, step: int, token: str, alive: list[int]) -> list[FoundPart]:
    """Each node has its own part and that of the node before it; only some are left, and get new numbers."""
    return [
        FoundPart(step, token, node, num_nodes, at)
        for at, old in enumerate(alive)
        for node in {old, (old - 1) % num_nodes}
    ]


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 7])
def test_any_one_node_may_be_missing_where_there_are_others(num_nodes: int) -> None:
    every = list(range(num_nodes))
    assert choose_sets(_kept(num_nodes, 8, "a", every), 0) == ([WholeSet(8, "a", tuple(every), min(2, num_nodes))], [])
    for lost in every:
        alive = [node for node in every if node != lost]
        whole, broken = choose_sets(_kept(num_nodes, 8, "a", alive), 0)
        if num_nodes == 1:
            assert (whole, broken) == ([], [])
            continue
        (found,) = whole
        assert alive[found.at[lost]] == (lost + 1) % num_nodes and broken == [] and found.num_copies == 1
    if num_nodes > 2:
        alive = every[2:]
        assert choose_sets(_kept(num_nodes, 8, "a", alive), 0)[1] == [BrokenSet(8, "a", num_nodes, (0,))]


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from("ab"), st.integers(-1, 4), st.integers(1, 3), st.integers(0, 3))
    ),
    st.integers(0, 3),
)
def test_every_part_of_a_whole_set_is_read_where_it_lies_and_no_save_is_mixed_with_another(rows, at_least) -> None:
    found = [FoundPart(*row) for row in rows]
    whole, broken = choose_sets(found, at_least)
    steps = [entry.step for entry in whole]
    assert steps == sorted(steps, reverse=True) and all(step >= at_least for step in steps)
    for entry in whole:
        for node, at in enumerate(entry.at):
            assert FoundPart(entry.step, entry.token, node, len(entry.at), at) in found
    for entry in broken:
        there = {
            part.node
            for part in found
            if (part.step, part.token, part.num_nodes) == (entry.step, entry.token, entry.num_nodes)
        }
        assert entry.missing and not there & {*entry.missing}
    assert choose_sets(reversed(found), at_least) == (whole, broken)


def test_parts_are_spread_over_the_nodes_that_have_them() -> None:
    # Two nodes have all four parts of a run on four.
    found = [FoundPart(8, "a", node, 4, at) for node in range(4) for at in (0, 1)]
    ((entry,), _) = choose_sets(found, 0)
    assert entry.at[:2] == (0, 1) and sorted(entry.at) == [0, 0, 1, 1]


def test_the_newest_whole_save_comes_first_and_older_ones_than_asked_for_are_left() -> None:
    found = [FoundPart(step, f"{step}", 0, 1, 0) for step in (3, 9, 5)]
    assert [entry.step for entry in choose_sets(found, 5)[0]] == [9, 5]

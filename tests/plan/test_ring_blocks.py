"""Blocks of a ring: each query meets each key that it sees once, whoever has it, and no key that it does not see."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.plan.batch import zigzag
from hpc_train.plan.ring_blocks import Block, num_rows, ring_blocks, runs


def tokens_of(lengths: list[int], num_ranks: int, place: int) -> list[tuple[int, int]]:
    """Sequence and place in it of each row of a member, from the definition of its parts."""
    return [
        (sequence, token)
        for sequence, length in enumerate(lengths)
        for start, stop in zigzag(length, num_ranks, place)
        for token in range(start, stop)
    ]


def pairs_of(block: Block, window: int | None) -> list[tuple[int, int]]:
    """Rows of queries and keys that see each other."""
    return [
        (block.query + i, block.key + j)
        for i in range(block.num_queries)
        for j in range(block.num_keys)
        if j <= i + block.lead and (window is None or j > i + block.lead - window)
    ]


@given(
    lengths=st.lists(st.integers(0, 40), max_size=4),
    num_ranks=st.integers(1, 6),
    window=st.one_of(st.none(), st.integers(1, 50)),
)
@settings(max_examples=60)
def test_each_token_sees_what_is_before_it_in_its_sequence_and_window_once(lengths, num_ranks, window) -> None:
    seen: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for place in range(num_ranks):
        queries = tokens_of(lengths, num_ranks, place)
        assert len(queries) == num_rows(lengths, num_ranks, place)
        for key_place in range(num_ranks):
            keys = tokens_of(lengths, num_ranks, key_place)
            for block in ring_blocks(lengths, num_ranks, place, key_place, window):
                pairs = pairs_of(block, window)
                assert len({query for query, _ in pairs}) == block.num_queries, "each query sees some of its keys"
                assert len({key for _, key in pairs}) == block.num_keys, "and each key is seen"
                hides_a_later_key = block.lead < block.num_keys - 1
                assert block.is_diagonal == hides_a_later_key
                assert not hides_a_later_key or (block.lead, block.num_queries) == (0, block.num_keys)
                seen += [(queries[query], keys[key]) for query, key in pairs]
    wanted = [
        ((sequence, query), (sequence, key))
        for sequence, length in enumerate(lengths)
        for query in range(length)
        for key in range(0 if window is None else max(0, query - window + 1), query + 1)
    ]
    assert sorted(seen) == sorted(wanted)


def test_parts_that_touch_are_one_run() -> None:
    assert [len(of_sequence) for of_sequence in runs([40, 40], 1, 0)] == [1, 1]
    assert [len(runs([40], 4, place)[0]) for place in range(4)] == [2, 2, 2, 1]
    assert runs([3, 0], 4, 1) == [[], []]


def test_members_of_a_ring_have_equal_shares_of_pairs() -> None:
    of_members = [
        sum(len(pairs_of(block, None)) for key in range(5) for block in ring_blocks([400], 5, place, key))
        for place in range(5)
    ]
    assert set(of_members) == {400 * 401 // 2 // 5}

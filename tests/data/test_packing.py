"""Packing: every token once, rows of one length, an order that depends on seed, epoch and source alone."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.data.packing import Packing, Piece, shuffled
from hpc_train.errors import ConfigError, DataError

document_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any)
POLICIES = ("split", "truncate", "drop")


def rows_of(packing, epoch=0):
    return [packing.row(epoch, i) for i in range(packing.rows_in_epoch(epoch))]


def tokens_of(rows):
    return [(piece.document, piece.start + i) for row in rows for piece in row for i in range(piece.length)]


@given(lengths=document_lengths, seq_len=st.integers(1, 50), seed=st.integers(0, 2**63), epoch=st.integers(0, 3))
def test_split_gives_every_token_once_in_full_rows(lengths, seq_len, seed, epoch):
    rows = rows_of(Packing(np.array(lengths), seq_len, "split", seed=seed), epoch)
    tokens = tokens_of(rows)
    assert sorted(tokens) == [(d, i) for d, length in enumerate(lengths) for i in range(length)]
    sizes = sorted(sum(piece.length for piece in row) for row in rows)
    assert sizes[1:] == [seq_len] * (len(rows) - 1)  # at most one row of an epoch is short
    assert 1 <= sizes[0] <= seq_len


@given(
    lengths=document_lengths,
    seq_len=st.integers(1, 50),
    policy=st.sampled_from(["truncate", "drop"]),
    epoch=st.integers(0, 3),
)
def test_truncate_and_drop_give_whole_documents_once(lengths, seq_len, policy, epoch):
    expected = {d: min(length, seq_len) for d, length in enumerate(lengths) if length}
    if policy == "drop":
        expected = {d: length for d, length in expected.items() if lengths[d] <= seq_len}
    if not expected:
        with pytest.raises(DataError):
            Packing(np.array(lengths), seq_len, policy)
        return
    rows = rows_of(Packing(np.array(lengths), seq_len, policy), epoch)
    pieces = [piece for row in rows for piece in row]
    assert {piece.document: piece.length for piece in pieces} == expected
    assert len(pieces) == len(expected)
    assert all(piece.start == 0 for piece in pieces)
    assert all(1 <= sum(piece.length for piece in row) <= seq_len for row in rows)


@given(lengths=document_lengths, policy=st.sampled_from(POLICIES))
def test_next_fit_fills_more_than_half_of_the_rows_places(lengths, policy):
    rows = rows_of(Packing(np.array(lengths), 40, policy))
    sizes = [sum(piece.length for piece in row) for row in rows]
    assert len(rows) <= 2 * sum(sizes) // 40 + 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("change", [{"seed": 2}, {"source_index": 1}, {"epoch": 1}])
def test_the_order_changes_with_seed_source_and_epoch_and_with_nothing_else(policy, change):
    lengths = np.arange(1, 60)

    def order(seed=1, source_index=0, epoch=0):
        return tokens_of(rows_of(Packing(lengths, 64, policy, seed=seed, source_index=source_index), epoch))

    assert order() == order()
    assert order(**change) != order()
    assert sorted(order(**change)) == sorted(order())


def test_rows_are_found_in_any_order():
    packing = Packing(np.arange(1, 60), 16, "split", seed=3)
    forward = [rows_of(packing, epoch) for epoch in (0, 1)]
    for epoch, row in [(1, 5), (0, 3), (1, 0), (0, 0), (0, 3)]:
        assert packing.row(epoch, row) == forward[epoch][row]


RECORDED_ORDER = [4, 5, 8, 6, 1, 9, 11, 0, 3, 10, 2, 7]
RECORDED_ROW = (Piece(document=1, start=0, length=8),)


def test_the_order_is_the_same_on_every_machine():
    """Recorded once; a change here would send every running job to other data on its next restart."""
    assert shuffled(12, 1234, 0, 0, 1).tolist() == RECORDED_ORDER
    assert Packing(np.array([3, 9, 1, 4]), 8, "split", seed=1234).row(0, 0) == RECORDED_ROW


def test_orders_of_neighbouring_keys_have_nothing_in_common():
    """A thousandth of the places agree by chance."""
    first = shuffled(1000, 7, 0, 0, 1)
    for key in [(7, 1, 0, 1), (8, 0, 0, 1), (7, 0, 1, 1), (7, 0, 0, 2)]:
        assert np.count_nonzero(first == shuffled(1000, *key)) < 10
    # No drift: early places hold early and late documents alike.
    assert 450 < first[:200].mean() < 550


def test_rows_of_a_long_document_are_spread_over_the_epoch():
    packing = Packing(np.array([6400] + [64] * 100), 64, "split", seed=5)
    at = [i for i, row in enumerate(rows_of(packing)) if any(piece.document == 0 for piece in row)]
    assert len(at) in (100, 101)
    neighbours = sum(after == before + 1 for before, after in itertools.pairwise(at))
    assert neighbours < 75  # half of the rows are its own, so about 50 by chance


L = 8


@pytest.mark.parametrize(
    "length, policy, rows, dropped",
    [
        (L - 1, "split", [[(0, L - 1)]], 0),
        (L, "split", [[(0, L)]], 0),
        (L + 1, "split", [[(0, L)], [(L, 1)]], 0),
        (4 * L, "split", [[(0, L)], [(L, L)], [(2 * L, L)], [(3 * L, L)]], 0),
        (L - 1, "truncate", [[(0, L - 1)]], 0),
        (L, "truncate", [[(0, L)]], 0),
        (L + 1, "truncate", [[(0, L)]], 1),
        (4 * L, "truncate", [[(0, L)]], 3 * L),
        (L - 1, "drop", [[(0, L - 1)]], 0),
        (L, "drop", [[(0, L)]], 0),
    ],
)
def test_a_document_about_as_long_as_a_row(length, policy, rows, dropped):
    """FC-81: the policy is the user's, a row is seq_len tokens and not one more, and losses are counted."""
    packing = Packing(np.array([length]), L, policy)
    assert sorted([[(p.start, p.length) for p in row] for row in rows_of(packing)]) == rows
    assert packing.counts.dropped_tokens == dropped
    assert packing.counts.longer_documents == int(length > L)


@pytest.mark.parametrize("length", [L + 1, 4 * L])
def test_a_longer_document_is_dropped_alone(length):
    """FC-81"""
    packing = Packing(np.array([length, 3]), L, "drop")
    assert rows_of(packing) == [(Piece(1, 0, 3),)]
    assert (packing.counts.dropped_documents, packing.counts.dropped_tokens) == (1, length)
    with pytest.raises(DataError, match=f"1 documents, {length} tokens, 0 empty, 1 dropped"):
        Packing(np.array([length]), L, "drop")


@pytest.mark.parametrize("policy", POLICIES)
def test_empty_documents_keep_their_numbers_and_give_no_tokens(policy):
    """FC-79"""
    packing = Packing(np.array([0, 5, 0, 0, 7, 0]), 8, policy)
    assert sorted(tokens_of(rows_of(packing))) == [(1, i) for i in range(5)] + [(4, i) for i in range(7)]
    assert packing.counts.empty_documents == 4
    assert all(piece.length for row in rows_of(packing) for piece in row)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_set_shorter_than_a_row_is_one_short_row(policy):
    """FC-79"""
    assert rows_of(Packing(np.array([3]), 8, policy)) == [(Piece(0, 0, 3),)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_a_set_without_tokens_is_refused_with_counts(lengths, policy):
    """FC-79"""
    with pytest.raises(DataError, match=f"{len(lengths)} documents, 0 tokens, {len(lengths)} empty"):
        Packing(np.array(lengths, dtype=np.int32), 8, policy)


def test_sums_of_lengths_are_64_bit():
    """FC-77: a stream of 2^33 tokens from an int32 index."""
    packing = Packing(np.full(8, 2**30, dtype=np.int32), 2**20, "split")
    assert packing.rows_in_epoch(0) == 2**13
    assert all(0 <= p.start < 2**30 for i in range(0, 2**13, 97) for p in packing.row(0, i))


def test_documents_are_numbered_from_the_first():
    packing = Packing(np.array([4, 4]), 8, "split", first_document=100)
    assert sorted(piece.document for piece in packing.row(0, 0)) == [100, 101]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("epoch, row", [(0, 1), (0, -1)])
def test_rows_outside_the_epoch_are_refused(policy, epoch, row):
    with pytest.raises(IndexError):
        Packing(np.array([3]), 8, policy).row(epoch, row)


def test_unknown_policies_and_sizes_are_refused():
    with pytest.raises(ConfigError, match="split, truncate, drop"):
        Packing(np.array([3]), 8, "cut")
    with pytest.raises(ConfigError, match="seq_len=0"):
        Packing(np.array([3]), 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_epoch_of_a_million_documents_is_set_up(policy):
    """Takes under a second on one idle core."""
    packing = Packing(np.random.default_rng(0).integers(0, 3000, 10**6), 2048, policy)
    assert 0 < sum(piece.length for piece in packing.row(0, 0)) <= 2048

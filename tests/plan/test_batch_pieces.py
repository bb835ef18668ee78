"""A rank's tokens of a micro-batch: what the plan says of them and what came go together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from hpc_train.plan.batch import MicroBatch, Ring, SequenceSlice
from hpc_train.plan.batch_balanced import BalancedPlanner
from hpc_train.plan.batch_pieces import PieceBatch
from tests.plan.test_batch_planners import problems


@given(problem=problems())
@settings(max_examples=40)
def test_all_members_of_a_ring_know_all_its_sequences(problem) -> None:
    table = BalancedPlanner().plan(problem)
    of_rings: dict[int, tuple[int, ...]] = {}
    places: list[tuple[int, int]] = []
    for rank in range(table.num_ranks):
        for micro_batch, lengths in zip(table.micro_batches(rank), table.lengths_of(rank), strict=True):
            batch = PieceBatch(rank, micro_batch, lengths, *np.zeros((2, micro_batch.num_tokens), np.int64))
            places += zip(batch.sequences().tolist(), batch.positions().tolist(), strict=True)
            assert rank == batch.members[batch.place]
            if micro_batch.ring is not None:
                assert of_rings.setdefault(micro_batch.ring.order, lengths) == lengths
    wanted = [(index, place) for index, length in enumerate(problem.lengths.tolist()) for place in range(length)]
    assert sorted(places) == wanted


RING = Ring((3, 1), 0)
PIECES = (SequenceSlice(5, 0, 2), SequenceSlice(5, 6, 2))


def test_labels_are_counted_without_those_that_teach_nothing() -> None:
    batch = PieceBatch(3, MicroBatch(PIECES, RING), (8,), np.arange(4), np.array([7, -100, 8, -100]))
    assert (batch.num_tokens, batch.num_supervised, batch.place, batch.members) == (4, 2, 0, (3, 1))
    assert batch.positions().tolist() == [0, 1, 6, 7]


@pytest.mark.parametrize(
    ("rank", "lengths", "count", "words"),
    [(3, (9,), 4, "pieces"), (1, (8,), 4, "pieces"), (3, (8, 8), 4, "pieces"), (3, (8,), 3, "4 tokens came with 3")],
)
def test_what_does_not_go_together_is_refused(rank: int, lengths: tuple[int, ...], count: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PieceBatch(rank, MicroBatch(PIECES, RING), lengths, *np.zeros((2, count), np.int64))


def test_a_rank_without_work_has_no_tokens() -> None:
    batch = PieceBatch(2, MicroBatch(()), (), *np.zeros((2, 0), np.int64))
    assert (batch.num_tokens, batch.num_supervised, batch.members) == (0, 0, (2,))
    assert len(batch.positions()) == len(batch.sequences()) == 0

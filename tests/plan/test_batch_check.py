"""Batch plans with rings that are wrong in one way each are refused; so are rings that tie pipelines into a circle."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hpc_train.errors import ConfigError
from hpc_train.plan.batch import BatchPlan, MicroBatch, Ring, SequenceSlice, zigzag
from hpc_train.plan.batch_check import check_batch_plan
from hpc_train.plan.batch_play import check_rings, play_rings
from hpc_train.plan.schedule_orders import plan_1f1b

LENGTHS = [10, 4, 7]


def part(sequence: int, ranks: tuple[int, ...], order: int, rank: int) -> MicroBatch:
    parts = zigzag(LENGTHS[sequence], len(ranks), ranks.index(rank))
    slices = tuple(SequenceSlice(sequence, start, stop - start) for start, stop in parts if stop > start)
    return MicroBatch(slices, Ring(ranks, order))


def alone(sequence: int) -> MicroBatch:
    return MicroBatch((SequenceSlice(sequence, 0, LENGTHS[sequence]),))


def good() -> list[list[MicroBatch]]:
    """Sequence 0 on ranks 2, 0; 2 on 1, 2; 1 on rank 0 alone."""
    return [[part(0, (2, 0), 0, 0), alone(1)], [part(2, (1, 2), 3, 1)], [part(0, (2, 0), 0, 2), part(2, (1, 2), 3, 2)]]


def check(ranks, capacity=(6, 6, 6), **options):
    check_batch_plan(BatchPlan(0, tuple(map(tuple, ranks)), len(LENGTHS)), LENGTHS, capacity, **options)


def test_a_sound_plan_passes():
    check(good())


def test_zigzag_gives_each_rank_an_early_and_a_late_part():
    assert [zigzag(16, 4, place) for place in range(4)] == [
        ((0, 2), (14, 16)), ((2, 4), (12, 14)), ((4, 6), (10, 12)), ((6, 8), (8, 10)),
    ]  # fmt: skip


def test_zigzag_shares_any_length_without_loss():
    for length in range(1, 18):
        for size in range(1, 5):
            parts = sorted(piece for place in range(size) for piece in zigzag(length, size, place))
            assert [start for start, _ in parts[1:]] == [stop for _, stop in parts[:-1]]
            assert (parts[0][0], parts[-1][1]) == (0, length)


def swapped(ranks):
    ranks[2].reverse()


def other_place(ranks):
    ranks[0][0] = MicroBatch(ranks[2][0].sequences, ranks[0][0].ring)
    ranks[2][0] = MicroBatch(good()[0][0].sequences, ranks[2][0].ring)


def other_ratio(ranks):
    ranks[0][0] = replace(ranks[0][0], offload_milli=100)


def not_in_it(ranks):
    ranks[0][0] = MicroBatch(ranks[0][0].sequences, Ring((2, 1), 0))


def without_ring(ranks):
    ranks[0][0] = MicroBatch(ranks[0][0].sequences)


def of_one(ranks):
    ranks[0][1] = MicroBatch(ranks[0][1].sequences, Ring((0,), 5))


@pytest.mark.parametrize(
    "spoil, says",
    [
        (swapped, "rank 2 meets ring 0 after ring 3"),
        (other_place, "and place 1 of its ring has"),
        (not_in_it, "which is without its rank"),
        (without_ring, "no ring that has the rest"),
        (of_one, "which is none"),
        (lambda ranks: ranks[0].pop(), "sequence 1 has 4 tokens"),
        (lambda ranks: ranks[0].append(alone(1)), "sequence 1 is cut"),
    ],
)
def test_a_plan_that_is_wrong_in_one_way_is_refused(spoil, says):
    ranks = good()
    spoil(ranks)
    with pytest.raises(ValueError, match=says):
        check(ranks)


def test_a_rank_without_any_micro_batch_is_refused():
    with pytest.raises(ValueError, match="rank 1 has no micro-batch"):
        check_batch_plan(BatchPlan(0, ((alone(0),), ()), 1), [10], [10, 10])


def test_a_ring_that_a_member_does_not_meet_is_refused_though_no_token_is_lost():
    ring = Ring((0, 1), 0)
    ranks = ((MicroBatch((SequenceSlice(0, 0, 1),), ring),), (MicroBatch(()),))
    with pytest.raises(ValueError, match="ring 0 waits for rank 1, which does not meet it"):
        check_batch_plan(BatchPlan(0, ranks, 1), [1], [4, 4])
    twice = (*ranks[0], MicroBatch((), Ring((0, 1), 1)), MicroBatch((), Ring((0, 1), 1)))
    with pytest.raises(ValueError, match="rank 0 meets ring 1 twice"):
        check_batch_plan(BatchPlan(0, (twice, (MicroBatch((), ring),)), 1), [1], [4, 4])


def test_members_that_offload_differently_are_refused():
    ranks = good()
    other_ratio(ranks)
    with pytest.raises(ValueError, match="do not have the same ring 0"):
        check(ranks, num_layers=4)


def test_too_many_tokens_are_refused_unless_offloading_makes_room():
    with pytest.raises(ValueError, match=r"micro-batch 0 of rank 0 has 5 tokens.*holds 4"):
        check(good(), capacity=(4, 6, 6))
    ranks = good()
    for rank in (0, 2):
        ranks[rank][0] = replace(ranks[rank][0], offload_milli=400)
    check(ranks, capacity=(4, 6, 4), num_layers=4)
    with pytest.raises(ValueError, match="holds 3"):
        check(ranks, capacity=(3, 6, 4), num_layers=4)
    with pytest.raises(ValueError, match="2 layers stay"):
        check(ranks, num_layers=2)


@pytest.mark.parametrize("ratio", [-1, 1001])
def test_an_offload_ratio_outside_of_its_range_is_refused(ratio):
    ranks = good()
    ranks[0][1] = replace(ranks[0][1], offload_milli=ratio)
    with pytest.raises(ValueError, match=re.escape(f"offload ratio {ratio} of 1000")):
        check(ranks, num_layers=4)


def test_rings_at_unequal_places_are_refused_where_pipelines_need_them_equal():
    with pytest.raises(ValueError, match="ring 3 is micro-batch 1 of rank 2, and 0 of another"):
        check(good(), is_aligned=True)


def test_rings_in_one_order_but_at_unequal_places_deadlock_in_pipelines_and_are_found():
    """In 1F1B the second ring's forward on rank 1 comes before the first one's backward there; on rank 0 after it."""
    first, second = Ring((0, 1), 0), Ring((0, 1), 1)
    empty = MicroBatch(())
    ranks = (
        (MicroBatch((), first), empty, empty, MicroBatch((), second)),
        (empty, empty, empty, empty, MicroBatch((), first), MicroBatch((), second)),
    )
    plan = BatchPlan(0, ranks, 0)
    schedules = [plan_1f1b(2, len(micro_batches)) for micro_batches in ranks]
    with pytest.raises(ConfigError, match=r"deadlock: stage . of hdp rank . waits for"):
        check_rings(plan, schedules)
    # The same without pipelines works: each micro-batch's backward follows its forward.
    check_rings(plan, [plan_1f1b(1, len(micro_batches)) for micro_batches in ranks])


def test_a_ring_begins_when_its_last_member_comes_and_takes_what_the_slowest_needs():
    ring = Ring((0, 1), 0)
    plan = BatchPlan(0, ((MicroBatch((), ring),), (MicroBatch(()), MicroBatch((), ring))), 0)
    schedules = [plan_1f1b(1, 1), plan_1f1b(1, 2)]
    played = play_rings(plan, schedules, lambda rank, action: 5 + rank)
    # Rank 1: 6 + 6 for its own micro-batch, then the ring's forward and backward at its pace.
    assert played.ends == (24, 24)


def test_schedules_must_have_each_rank_s_number_of_micro_batches():
    plan = BatchPlan(0, ((MicroBatch(()),),), 0)
    with pytest.raises(ConfigError, match=r"have \[2\] micro-batches, and the batch plan gives its ranks \[1\]"):
        check_rings(plan, [plan_1f1b(2, 2)])

"""The batch plan: every token of every sequence goes to exactly one place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.errors import ConfigError
from hpc_train.plan.batch import (
    BatchPlan,
    MicroBatch,
    SequenceSlice,
    check_batch_sizes,
    check_plan,
    plan_batch_static,
)

sizes = st.integers(1, 6)


@given(dp=sizes, micro_batch_size=sizes, num_micro_batches=sizes, seq_len=st.integers(1, 1 << 20))
def test_every_token_of_every_sequence_is_given_out_once(dp, micro_batch_size, num_micro_batches, seq_len):
    num_sequences = dp * micro_batch_size * num_micro_batches
    plan = plan_batch_static(7, num_sequences, seq_len, micro_batch_size, dp)
    check_plan(plan, [seq_len] * num_sequences)
    assert (plan.step, plan.dp, plan.num_sequences) == (7, dp, num_sequences)
    assert plan.num_tokens == num_sequences * seq_len
    assert {len(rank) for rank in plan.ranks} == {num_micro_batches}


@given(dp=sizes, micro_batch_size=sizes, num_micro_batches=sizes)
def test_a_rank_has_a_contiguous_block_in_order(dp, micro_batch_size, num_micro_batches):
    plan = plan_batch_static(0, dp * micro_batch_size * num_micro_batches, 8, micro_batch_size, dp)
    order = [s.sequence for rank in plan.ranks for micro_batch in rank for s in micro_batch.sequences]
    assert order == list(range(plan.num_sequences))


def test_a_plan_is_a_value():
    assert plan_batch_static(3, 8, 16, 2, 2) == plan_batch_static(3, 8, 16, 2, 2)
    assert hash(plan_batch_static(3, 8, 16, 2, 2)) == hash(plan_batch_static(3, 8, 16, 2, 2))


@pytest.mark.parametrize(
    "global_batch_size, micro_batch_size, dp, nearest",
    [(10, 2, 4, "8 or 16"), (3, 2, 4, "8"), (17, 1, 8, "16 or 24")],
)
def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_do(
    global_batch_size, micro_batch_size, dp, nearest
):
    with pytest.raises(ConfigError, match=f"global_batch_size={nearest},"):
        check_batch_sizes(global_batch_size, micro_batch_size, dp)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (8, 0, 1), (8, 1, 0), (-8, 1, 1)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ConfigError, match="at least 1"):
        check_batch_sizes(*sizes)


def plan_of(*slices: tuple[int, int, int], num_sequences: int = 1) -> BatchPlan:
    """A plan that gives each slice to a rank of its own."""
    return BatchPlan(0, tuple((MicroBatch((SequenceSlice(*piece),)),) for piece in slices), num_sequences)


def test_a_sequence_may_lie_on_several_ranks_with_unequal_parts():
    check_plan(plan_of((0, 5, 11), (1, 0, 4), (0, 0, 5), num_sequences=2), [16, 4])


@pytest.mark.parametrize(
    "slices",
    [
        [(0, 0, 15)],  # the last token is lost
        [(0, 1, 15)],  # the first
        [(0, 0, 8), (0, 9, 7)],  # one in the middle
        [(0, 0, 9), (0, 8, 8)],  # one comes twice
        [(0, 0, 16), (0, 0, 16)],
        [(0, 0, 17)],
        [(0, 0, 16), (0, 16, 0)],
        [(1, 0, 16)],
    ],
)
def test_a_plan_that_loses_or_doubles_tokens_is_found_out(slices):
    with pytest.raises(ValueError):
        check_plan(plan_of(*slices), [16])

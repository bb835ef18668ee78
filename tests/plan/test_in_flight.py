"""What stages keep at most, against a count over the whole plan's lists."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpc_train.plan.in_flight import most_in_flight
from hpc_train.plan.schedule import Op
from hpc_train.plan.schedule_orders import plan_schedule, shortened_work

_SIZES = st.lists(st.integers(0, 9), min_size=3, max_size=3)


@given(
    st.sampled_from(["1f1b", "zero_bubble"]), st.integers(1, 5), st.integers(0, 6), st.integers(1, 3), _SIZES, _SIZES
)
@example("1f1b", 7, 97, 2, [3, 5, 0], [0, 0, 0])  # of groups of 8 and of 7 there are more than need be looked at
@example("zero_bubble", 7, 97, 3, [9, 1, 4], [2, 7, 1])
@example("zero_bubble", 3, 40, 2, [1, 8, 0], [5, 1, 0])
def test_the_fullest_moment_is_that_of_the_plan(kind, stages, more, virtual, kept, queued):
    kept, queued = kept[:virtual], queued[:virtual]
    for stage, actions in enumerate(plan_schedule(kind, stages, stages + more, virtual).actions):
        counts = {Op.F: [0] * virtual, Op.B: [0] * virtual, Op.W: [0] * virtual}
        most = 0
        for action in actions:
            if action.op not in counts:
                continue
            counts[action.op][action.model_chunk] += 1
            now = sum(
                size * (forward - backward)
                for size, forward, backward in zip(kept, counts[Op.F], counts[Op.B], strict=True)
            )
            if kind == "zero_bubble":
                now += sum(
                    size * (backward - weight)
                    for size, backward, weight in zip(queued, counts[Op.B], counts[Op.W], strict=True)
                )
            most = max(most, now)
        found = most_in_flight(kind, stages, stages + more, stage, kept, queued)
        assert found.num_bytes == most
        parts = zip(found.forwarded, kept, found.queued, queued, strict=True)
        assert sum(forwarded * size + waiting * left for forwarded, size, waiting, left in parts) == most


@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble"])
def test_no_more_is_looked_at_for_a_billion_micro_batches_than_for_a_hundred(kind):
    assert shortened_work(kind, 3, 10**9, 2) == shortened_work(kind, 3, 100, 2)

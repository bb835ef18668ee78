"""What stages keep at most, against a count over the whole plan's lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpc_train.plan.in_flight import most_in_flight
from hpc_train.plan.schedule import Op
from hpc_train.plan.schedule_orders import plan_schedule


@given(st.sampled_from(["1f1b", "zero_bubble"]), st.integers(1, 5), st.integers(0, 6), st.integers(1, 3), st.data())
def test_the_fullest_moment_is_that_of_the_plan(kind, stages, more, virtual, data):
    kept, queued = (
        data.draw(st.lists(st.integers(0, 9), min_size=virtual, max_size=virtual), label=what)
        for what in ("kept", "queued")
    )
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

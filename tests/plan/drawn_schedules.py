"""Hypothesis strategies for sound schedules: our plans, those written by hand, and random orders that work."""

from __future__ import annotations

from hypothesis import strategies as st

from hpc_train.plan.schedule import Action, Op, Schedule
from hpc_train.plan.schedule_orders import plan_schedule
from hpc_train.plan.schedule_transfers import with_transfers
from tests.plan.hand_schedules import BY_HAND

Chunks = tuple[tuple[int, ...], ...]


@st.composite
def orders_of_work(draw: st.DrawFn) -> tuple[int, Chunks, list[list[Action]]]:
    """Micro-batches, chunks, and each stage's F, B and maybe W in the order of a random execution."""
    num_stages = draw(st.integers(1, 3))
    num_model_chunks = draw(st.integers(1, 2))
    num_micro_batches = draw(st.integers(1, 3))
    split = draw(st.booleans())
    order = draw(st.permutations(range(num_stages * num_model_chunks)))
    chunks = tuple(tuple(order[stage::num_stages]) for stage in range(num_stages))
    places = {chunk: (stage, own) for stage, held in enumerate(chunks) for own, chunk in enumerate(held)}
    last = len(places) - 1
    compute: list[list[Action]] = [[] for _ in chunks]
    ready = [(Op.F, index, 0) for index in range(num_micro_batches)]
    while ready:
        op, index, chunk = ready.pop(draw(st.integers(0, len(ready) - 1)))
        stage, own = places[chunk]
        compute[stage].append(Action(op, index, own))
        if op is Op.F:
            ready.append((Op.F, index, chunk + 1) if chunk < last else (Op.B, index, chunk))
        elif op is Op.B:
            ready += [(Op.B, index, chunk - 1)] if chunk else []
            ready += [(Op.W, index, chunk)] if split else []
    return num_micro_batches, chunks, compute


def schedule_of(num_micro_batches: int, chunks: Chunks, compute: list[list[Action]]) -> Schedule:
    """The schedule of this work, with the transfers that it needs."""
    lists = [with_transfers(stage, compute, chunks, num_micro_batches) for stage in range(len(chunks))]
    return Schedule(num_micro_batches, chunks, lists)


def sound_schedules() -> st.SearchStrategy[Schedule]:
    drawn = orders_of_work().map(lambda order: schedule_of(*order))
    return st.one_of(drawn, planned_schedules(), st.sampled_from(list(BY_HAND.values())))


def planned_schedules(max_stages: int = 4, max_more: int = 3) -> st.SearchStrategy[Schedule]:
    """What our planners make. max_more: micro-batches beyond the number of stages."""
    kinds = st.sampled_from(["1f1b", "zero_bubble"])
    return st.integers(1, max_stages).flatmap(
        lambda p: st.builds(plan_schedule, kinds, st.just(p), st.integers(p, p + max_more), st.integers(1, 3))
    )

"""Simulated times, by hand and by the published formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.plan.schedule import COMPUTE, Op, Schedule
from hpc_train.plan.schedule_orders import plan_1f1b
from hpc_train.plan.simulate import Makespans, simulate, time_of_work
from tests.plan.drawn_schedules import sound_schedules
from tests.plan.even_costs import even_costs
from tests.plan.hand_schedules import EVERYTHING_ELSE, INTERLEAVED, ZERO_BUBBLE, parse, written


def test_two_stages_by_hand():
    found = simulate(
        written(1, ((0,), (1,)), "F0 sa0>1 rg0<1 B0", "ra0<0 F0 B0 sg0>0"), lambda stage, action: 1 + stage
    )
    # Stage 0: F 0-1, its send is under way 1-2; stage 1: F 2-4, B 4-6, its send 6-8; stage 0: B 8-9.
    assert found.spans == (((0, 1), (1, 1), (1, 1), (8, 9)), ((0, 0), (2, 4), (4, 6), (6, 6)))
    assert (found.busy, found.makespan) == ((2, 4), 9)
    assert found.bubble == (18 - 6) / 18


def test_a_slow_stage_sets_the_pace():
    def costs(stage, action):
        return {Op.F: 1, Op.B: 2}.get(action.op, 0) * (3 if stage == 1 else 1)

    found = simulate(plan_1f1b(3, 9), costs)
    assert found.busy == (27, 81, 27)
    # The slow stage is busy from the first forward's end to the last backward's start.
    assert found.makespan == 1 + 81 + 2


@pytest.mark.parametrize("transfer", [1, 5, 10])
def test_eager_1f1b_pays_for_transfers_once_and_1f1b_once_for_each_micro_batch(transfer):
    def makespan(micro_batches: int, eager: bool) -> int:
        costs = even_costs(forward=10, backward=20, transfer=transfer)
        return simulate(plan_1f1b(2, micro_batches, eager=eager), costs).makespan

    for micro_batches in (4, 16):
        assert makespan(micro_batches, eager=True) == 30 * (micro_batches + 1) + 2 * transfer
    assert makespan(16, eager=False) - makespan(4, eager=False) == 12 * (30 + transfer)


def test_chunks_in_turn_and_split_backwards_shrink_the_bubble():
    one_f_one_b = simulate(plan_1f1b(2, 2), even_costs(forward=2, backward=4)).bubble
    assert one_f_one_b == 1 / 3
    # Half the layers a chunk: (p - 1) / (v m + p - 1).
    assert simulate(INTERLEAVED, even_costs(forward=1, backward=2)).bubble == 1 / 5
    split = simulate(ZERO_BUBBLE, even_costs(forward=1, backward=1, weight=1))
    whole = simulate(plan_1f1b(2, 3), even_costs(forward=1, backward=2))
    # ZB-H1: (p - 1)(F + B - W) instead of (p - 1)(F + B + W).
    assert split.makespan - 9 == 1
    assert whole.makespan - 9 == 3


def test_copies_and_collectives_run_beside_the_work_until_they_are_needed():
    def costs(stage, action):
        return {Op.F: 1, Op.B: 1, Op.ALL_GATHER: 5, Op.REDUCE_SCATTER: 7, Op.RELOAD: 2}.get(action.op, 0)

    found = simulate(EVERYTHING_ELSE, costs)
    starts = [start for start, _ in found.spans[0]]
    assert starts[:2] == [0, 5]
    assert found.makespan == max(spans[-1][0] for spans in found.spans) + 7


def test_a_schedule_that_deadlocks_has_no_time():
    with pytest.raises(ValueError, match="check_schedule says where"):
        simulate(written(1, ((0,), (1,)), "F0 rg0<1 B0 sa0>1", "ra0<0 F0 B0 sg0>0"), even_costs(forward=1, backward=1))
    with pytest.raises(ValueError, match="check_schedule says where"):
        Makespans(written(1, ((0,), (1,)), "F0 rg0<1 B0 sa0>1", "ra0<0 F0 B0 sg0>0"))


def test_nothing_to_do_has_no_bubble():
    assert simulate(Schedule(1, ((0,),), ((),)), even_costs(forward=1, backward=1)).bubble == 0.0


@given(sound_schedules(), st.lists(st.integers(0, 9), min_size=18, max_size=18))
def test_the_time_of_the_work_alone_is_that_of_a_schedule_whose_messages_take_none(schedule, drawn):
    def costs(stage, action):
        return drawn[3 * action.model_chunk + 7 * stage % 9 + (action.op is Op.B)] if action.op in COMPUTE else 0

    work = [[action for action in actions if action.op in COMPUTE] for actions in schedule.actions]
    assert time_of_work(work, schedule.chunks, costs) == simulate(schedule, costs).makespan


@given(sound_schedules(), st.lists(st.lists(st.integers(0, 9), min_size=23, max_size=23), min_size=2, max_size=3))
def test_a_course_that_is_found_once_gives_the_makespans_of_all_costs(schedule, drawn):
    makespans = Makespans(schedule)
    for numbers in drawn:

        def costs(stage, action, numbers=numbers):
            return numbers[(3 * action.model_chunk + 7 * stage + 5 * list(Op).index(action.op)) % 23]

        assert makespans.of(costs) == simulate(schedule, costs).makespan


def test_the_time_of_work_that_deadlocks_is_refused():
    with pytest.raises(ValueError, match="check_schedule says where"):
        time_of_work([parse("B0 F0"), parse("F0 B0")], ((0,), (1,)), even_costs(forward=1, backward=1))

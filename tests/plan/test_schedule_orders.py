"""Planned schedules of every kind: sound, as long as the formulas say, in the memory that they promise."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.errors import ConfigError
from hpc_train.plan.check_schedule import check_in_order, check_schedule
from hpc_train.plan.play import find_mismatch, play
from hpc_train.plan.schedule import COMPUTE, Op, Payload, Schedule
from hpc_train.plan.schedule_orders import (
    FEW_SENDS,
    bubble_formula,
    plan_1f1b,
    plan_forward_only,
    plan_schedule,
    plan_zero_bubble,
)
from hpc_train.plan.schedule_steps import pipeline_steps
from hpc_train.plan.simulate import simulate
from tests.plan.drawn_schedules import planned_schedules
from tests.plan.even_costs import even_costs
from tests.plan.hand_schedules import is_sound, parse, written

shapes = st.tuples(st.integers(1, 6), st.integers(0, 9), st.integers(1, 3))


def _most_in_work(schedule: Schedule, stage: int, until: Op) -> int:
    """Most chunks and micro-batches at a time that are forwarded and not yet through `until`."""
    held = most = 0
    for action in schedule.actions[stage]:
        held += {Op.F: 1, until: -1}.get(action.op, 0)
        most = max(most, held)
    return most


@given(planned_schedules(max_stages=6, max_more=9))
def test_every_plan_is_sound_and_runs_in_order_on_a_communicator_each_way(schedule):
    check_schedule(schedule)
    assert is_sound(schedule)
    check_in_order(schedule)


@given(st.sampled_from(["1f1b", "zero_bubble"]), shapes)
def test_simulation_and_formula_agree_for_any_number_of_micro_batches(kind, shape):
    stages, more, virtual = shape
    schedule = plan_schedule(kind, stages, stages + more, virtual)
    costs = even_costs(forward=1, backward=1, weight=1) if kind == "zero_bubble" else even_costs(forward=1, backward=2)
    found = simulate(schedule, costs)
    makespan = Fraction(3 * virtual * (stages + more)) + (stages - 1) * (1 if kind == "zero_bubble" else 3)
    assert found.makespan == makespan
    assert found.bubble == pytest.approx(bubble_formula(kind, stages, stages + more, virtual), abs=1e-12)


@given(shapes, st.integers(1, 9), st.integers(1, 9))
def test_interleaving_divides_the_idle_time_whatever_forward_and_backward_cost(shape, forward, backward):
    stages, more, virtual = shape
    found = simulate(
        plan_1f1b(stages, stages + more, virtual_stages=virtual), even_costs(forward=forward, backward=backward)
    )
    assert found.makespan == (virtual * (stages + more) + stages - 1) * (forward + backward)


@given(shapes, st.tuples(*[st.integers(1, 9)] * 3))
def test_zero_bubble_is_never_slower_than_whole_backwards(shape, costs):
    stages, more, virtual = shape
    forward, backward, weight = costs
    split = simulate(
        plan_zero_bubble(stages, stages + more, virtual_stages=virtual),
        even_costs(forward=forward, backward=backward, weight=weight),
    )
    whole = simulate(
        plan_1f1b(stages, stages + more, virtual_stages=virtual),
        even_costs(forward=forward, backward=backward + weight),
    )
    assert split.makespan <= whole.makespan


@given(st.integers(1, 8), st.integers(0, 9))
def test_zb_h1_keeps_as_many_micro_batches_as_1f1b_s_first_stage(stages, more):
    schedule = plan_zero_bubble(stages, stages + more)
    for stage in range(stages):
        assert _most_in_work(schedule, stage, Op.B) == stages - stage
        assert _most_in_work(schedule, stage, Op.W) <= stages


@given(shapes)
def test_interleaved_stages_keep_a_round_of_a_group_and_two_for_each_stage_behind(shape):
    stages, more, virtual = shape
    schedule = plan_1f1b(stages, stages + more, virtual_stages=virtual, eager=True)
    largest_group = -(-(stages + more) // ((stages + more) // stages))
    for stage in range(stages):
        expected = (virtual - 1) * largest_group + 2 * (stages - 1 - stage) + 1
        assert _most_in_work(schedule, stage, Op.B) == min(expected, virtual * (stages + more))


def test_interleaved_forwards_of_a_number_that_the_stages_do_not_divide():
    """Five micro-batches on two stages go in groups of three and two."""
    work = [action for action in plan_1f1b(2, 5, virtual_stages=2).actions[1] if action.op in COMPUTE]
    assert tuple(work) == parse("F0 F1 F2 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3 B0 F4 B1 F3.1 B2 F4.1 B3.1 B4.1 B3 B4")


def test_zero_bubble_of_three_stages_and_four_micro_batches():
    work = [tuple(action for action in stage if action.op in COMPUTE) for stage in plan_zero_bubble(3, 4).actions]
    assert work == [
        parse("F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"),
        parse("F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3"),
        parse("F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"),
    ]


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3))
def test_forwards_alone_hand_every_micro_batch_through_all_chunks(stages, micro_batches, virtual):
    schedule = plan_forward_only(stages, micro_batches, virtual)
    made = {
        (schedule.chunks[stage][action.model_chunk], action.micro_batch)
        for stage, actions in enumerate(schedule.actions)
        for action in actions
        if action.op is Op.F
    }
    assert made == {(chunk, index) for chunk in range(stages * virtual) for index in range(micro_batches)}
    assert {action.payload for actions in schedule.actions for action in actions} <= {None, Payload.ACTIVATION}
    if micro_batches >= stages:
        costs = even_costs(forward=1, backward=0)
        assert simulate(schedule, costs).makespan == virtual * micro_batches + stages - 1


def _without_waits(schedule: Schedule) -> Schedule:
    """The same lists, where no send waits for another one."""
    lists = [[replace(action, sends_over=0) for action in actions] for actions in schedule.actions]
    return replace(schedule, actions=lists)


def _most_sends(schedule: Schedule, stage: int, peer: int) -> int:
    """Most sends to the peer at a time that are posted and that nothing has waited for."""
    under_way = most = 0
    for action in schedule.actions[stage]:
        if action.peer == peer:
            under_way += (action.op is Op.SEND) - action.sends_over
            most = max(most, under_way)
    return most


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 3), st.integers(0, 12))
def test_forwards_alone_have_few_sends_under_way_and_neither_hang_nor_take_longer(stages, more, virtual, transfer):
    schedule = plan_forward_only(stages, more, virtual)
    for one_queue_each_way in (False, True):
        assert not play(pipeline_steps([schedule], one_queue_each_way=one_queue_each_way)).stuck
    assert find_mismatch(pipeline_steps([schedule])) is None
    costs = even_costs(forward=6, backward=0, transfer=transfer)
    assert simulate(schedule, costs).makespan == simulate(_without_waits(schedule), costs).makespan
    for stage, peer in itertools.permutations(range(stages), 2):
        assert _most_sends(schedule, stage, peer) <= (max(FEW_SENDS, stages - 1) if peer == 0 else FEW_SENDS)


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_an_evaluation_has_no_more_under_way_than_a_step_s_memory_is_counted_with(stages, virtual):
    for num_micro_batches in range(stages, 4 * stages):
        evaluation = plan_forward_only(stages, num_micro_batches, virtual)
        training = plan_1f1b(stages, num_micro_batches, virtual_stages=virtual)
        for stage in range(stages):
            kept = _most_in_work(training, stage, Op.B) + 1
            sent = sum(_most_sends(evaluation, stage, peer) for peer in range(stages))
            assert sent <= kept


@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble"])
def test_too_few_micro_batches_and_no_virtual_stage_are_refused_with_what_would_work(kind):
    with pytest.raises(ConfigError, match=r"pp=4 .* 3 micro-batches .* needs at least 4. Use parallel.pp=3 or less"):
        plan_schedule(kind, 4, 3, 2)
    with pytest.raises(ConfigError, match=r"virtual_stages=0 leaves a stage without layers"):
        plan_schedule(kind, 4, 8, 0)


def test_an_early_receive_from_the_last_stage_that_holds_up_a_send_is_refused_in_order_only():
    schedule = written(
        1,
        ((0,), (1,), (2,)),
        "F0 sa0>1 rg0<1 B0",
        "ra0<0 F0 sa0>2 rg0<2 B0 sg0>0",
        "ra0<1 F0 B0 sg0>1",
    )
    check_in_order(schedule)
    # Two micro-batches, where stage 1 asks for the second before it passes on the first, which stage 0 waits for.
    early = written(
        2,
        ((0,), (1,), (2,)),
        "F0 sa0>1 rg0<1 B0 F1 sa1>1 rg1<1 B1",
        "ra0<0 ra1<0 F0 sa0>2 rg0<2 B0 sg0>0 F1 sa1>2 rg1<2 B1 sg1>0",
        "ra0<1 F0 B0 sg0>1 ra1<1 F1 B1 sg1>1",
    )
    check_schedule(early)
    with pytest.raises(ConfigError, match=r"deadlocks: stage 0 waits for gradient 0 of chunk 1"):
        check_in_order(early)

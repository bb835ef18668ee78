"""Schedules: 1F1B's shape, what can be written as one, and transfers added to any order of work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.errors import ConfigError
from hpc_train.plan.check_schedule import check_schedule
from hpc_train.plan.schedule import COMPUTE, Action, Op, Payload, Schedule, StageLists, source_of
from hpc_train.plan.schedule_collectives import plan_training
from hpc_train.plan.schedule_orders import plan_1f1b
from hpc_train.plan.schedule_transfers import with_transfers
from hpc_train.plan.simulate import simulate
from tests.plan.drawn_schedules import orders_of_work, schedule_of, sound_schedules
from tests.plan.even_costs import even_costs
from tests.plan.hand_schedules import is_sound, parse

pipelines = st.integers(1, 6).flatmap(lambda stages: st.tuples(st.just(stages), st.integers(stages, stages + 6)))


def test_1f1b_of_three_stages_and_four_micro_batches():
    assert plan_1f1b(3, 4).actions == (
        parse("F0 sa0>1 F1 sa1>1 rg0<1 F2 sa2>1 B0 rg1<1 F3 sa3>1 rg2<1 B1 rg3<1 B2 B3"),
        parse(
            "ra0<0 ra1<0 F0 sa0>2 rg0<2 F1 sa1>2 ra2<0 B0 sg0>0 rg1<2 F2 sa2>2 ra3<0 B1 sg1>0 "
            "rg2<2 F3 sa3>2 rg3<2 B2 sg2>0 B3 sg3>0"
        ),
        parse("ra0<1 F0 ra1<1 B0 sg0>1 F1 ra2<1 B1 sg1>1 F2 ra3<1 B2 sg2>1 F3 B3 sg3>1"),
    )


@given(pipelines, st.booleans())
def test_1f1b_is_sound_and_idles_as_the_formula_says(pipeline, eager):
    stages, micro_batches = pipeline
    schedule = plan_1f1b(stages, micro_batches, eager=eager)
    check_schedule(schedule)
    assert is_sound(schedule)
    found = simulate(schedule, even_costs(forward=2, backward=4))
    assert found.bubble == (stages - 1) / (micro_batches + stages - 1)
    assert found.busy == (6 * micro_batches,) * stages


@given(pipelines, st.booleans())
def test_1f1b_holds_as_many_micro_batches_as_stages_are_left(pipeline, eager):
    stages, micro_batches = pipeline
    for stage, actions in enumerate(plan_1f1b(stages, micro_batches, eager=eager).actions):
        held = most = 0
        for action in actions:
            held += {Op.F: 1, Op.B: -1}.get(action.op, 0)
            most = max(most, held)
        left = stages - 1 - stage
        assert most == min(micro_batches, 1 + (2 * left if eager else left))


@given(pipelines)
def test_every_receive_of_1f1b_but_a_stages_first_runs_beside_work(pipeline):
    for actions in plan_1f1b(*pipeline).actions:
        work = [index for index, action in enumerate(actions) if action.op in COMPUTE]
        for index, action in enumerate(actions):
            if action.op is Op.RECV:
                consumer = Action(Op.F if action.payload is Payload.ACTIVATION else Op.B, action.micro_batch)
                needed = actions.index(consumer)
                assert needed == work[0] or any(index < place < needed for place in work)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (8, 5)])
def test_1f1b_refuses_fewer_micro_batches_than_stages_with_what_would_work(stages, micro_batches):
    wanted = rf"parallel.pp={stages} .* {micro_batches} micro-batches .* Use parallel.pp={micro_batches} or less"
    with pytest.raises(ConfigError, match=wanted):
        plan_1f1b(stages, micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches"), [(0, 1), (1, 0)])
def test_1f1b_refuses_nothing_to_do(stages, micro_batches):
    with pytest.raises(ConfigError, match="at least 1 stage and 1 micro-batch"):
        plan_1f1b(stages, micro_batches)


@given(orders_of_work())
def test_any_order_in_which_the_work_can_be_done_becomes_a_sound_schedule(order):
    _, _, compute = order
    schedule = schedule_of(*order)
    check_schedule(schedule)
    assert is_sound(schedule)
    assert [[action for action in stage if action.op in COMPUTE] for stage in schedule.actions] == compute


def test_work_whose_continuation_is_missing_gets_no_transfers():
    with pytest.raises(ValueError, match="stage 1 never does the forward of micro-batch 0"):
        with_transfers(1, [parse("F0 B0"), parse("B0")], ((0,), (1,)), 1)


@pytest.mark.parametrize("chunks", [(), ((0,), (0,)), ((0, 1), (2,)), ((1,), (2,))])
def test_chunks_are_each_in_one_place_and_equally_many(chunks):
    with pytest.raises(ValueError, match="chunks="):
        Schedule(1, chunks, ((),) * len(chunks))


def test_a_schedule_has_a_list_for_each_stage():
    with pytest.raises(ValueError, match="1 lists of actions for 2 stages"):
        Schedule(1, ((0,), (1,)), ((),))


@pytest.mark.parametrize(
    "fields",
    [
        {"op": Op.SEND, "micro_batch": 0, "peer": 1},
        {"op": Op.RECV, "micro_batch": 0, "payload": Payload.GRADIENT},
        {"op": Op.F, "micro_batch": 0, "peer": 1, "payload": Payload.ACTIVATION},
        {"op": Op.B},
        {"op": Op.REDUCE_SCATTER, "micro_batch": 0},
    ],
)
def test_an_action_has_what_its_op_needs_and_no_more(fields):
    with pytest.raises(ValueError, match="need"):
        Action(**fields)


def _user_of(action: Action, stage: int, schedule: Schedule) -> Action:
    """The F or B, on the stage that a send goes to or a receive is of, that needs the payload."""
    op, step = (Op.F, 1) if action.payload is Payload.ACTIVATION else (Op.B, -1)
    if action.op is Op.RECV:
        return Action(op, action.micro_batch, action.model_chunk)
    chunk = schedule.chunks[stage][action.model_chunk] + step
    return Action(op, action.micro_batch, schedule.places[chunk][1])


@given(sound_schedules())
def test_sends_are_over_where_the_maker_of_what_has_come_has_used_them(schedule):
    for stage, actions in enumerate(schedule.actions):
        for peer, its_actions in enumerate(schedule.actions):
            sends = [action for action in actions if action.op is Op.SEND and action.peer == peer]
            num_over = 0
            for receive in [action for action in actions if action.op is Op.RECV and action.peer == peer]:
                needed_by = _user_of(receive, stage, schedule)
                source = source_of(needed_by, stage, schedule.chunks)
                made = its_actions.index(replace(needed_by, model_chunk=schedule.places[source][1]))
                num_over += receive.sends_over
                assert num_over <= len(sends)
                for send in sends[:num_over]:
                    assert its_actions.index(_user_of(send, stage, schedule)) <= made
                    assert actions.index(send) < actions.index(needed_by)


@pytest.mark.parametrize(("kind", "stages", "virtual"), [("1f1b", 3, 1), ("zero_bubble", 3, 2), ("1f1b", 2, 2)])
def test_all_but_the_last_sends_are_let_go_in_the_step(kind, stages, virtual):
    left_over = []
    for num_micro_batches in (24, 48):
        actions = plan_training(kind, stages, num_micro_batches, virtual).actions[1]
        sends = sum(1 for action in actions if action.op is Op.SEND)
        left_over.append(sends - sum(action.sends_over for action in actions))
    assert left_over[0] == left_over[1] < 12


def test_a_stage_s_list_is_planned_without_those_that_it_exchanges_nothing_with():
    asked: list[int] = []

    def work_of(stage: int) -> tuple[Action, ...]:
        asked.append(stage)
        return parse("F0 F1 B0 B1")

    chunks = tuple((stage,) for stage in range(64))
    lists = StageLists(64, lambda stage: with_transfers(stage, StageLists(64, work_of), chunks, 2))
    assert (
        lists[7] is lists[-57] is lists[7:8][0] == parse("ra0<6 ra1<6 F0 sa0>8 rg0<8 F1 sa1>8 rg1<8 B0 sg0>6 B1 sg1>6")
    )
    assert sorted(asked) == [6, 7, 8]

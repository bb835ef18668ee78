"""Schedules: 1F1B's shape, what can be written as one, and transfers added to any order of work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.errors import ConfigError
from hpc_train.plan.check_schedule import check_schedule
from hpc_train.plan.schedule import COMPUTE, Action, Op, Payload, Schedule, add_transfers, source_of
from hpc_train.plan.schedule_orders import plan_1f1b
from hpc_train.plan.simulate import even_costs, simulate
from tests.plan.drawn_schedules import orders_of_work, sound_schedules
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
    num_micro_batches, chunks, compute = order
    schedule = Schedule(num_micro_batches, chunks, add_transfers(compute, chunks))
    check_schedule(schedule)
    assert is_sound(schedule)
    assert [[action for action in stage if action.op in COMPUTE] for stage in schedule.actions] == compute


def test_work_whose_continuation_is_missing_gets_no_transfers():
    with pytest.raises(ValueError, match="stage 1 never does the forward of micro-batch 0"):
        add_transfers([parse("F0 B0"), parse("B0")], ((0,), (1,)))


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


@given(sound_schedules())
def test_a_send_is_over_where_the_answer_s_maker_has_used_it_and_named_once(schedule):
    for stage, actions in enumerate(schedule.actions):
        named = [send for sends in schedule.sends_over[stage].values() for send in sends]
        assert len(named) == len(set(named))
        assert set(named) <= {action for action in actions if action.op is Op.SEND}
        for action, sends in schedule.sends_over[stage].items():
            # The message that the action waits for was made behind all that used these sends.
            source = source_of(action, stage, schedule.chunks)
            peer, there = schedule.places[source]
            made = schedule.actions[peer].index(Action(action.op, action.micro_batch, there))
            for send in sends:
                chunk = schedule.chunks[stage][send.model_chunk] + (1 if send.payload is Payload.ACTIVATION else -1)
                op = Op.F if send.payload is Payload.ACTIVATION else Op.B
                assert schedule.actions[peer].index(Action(op, send.micro_batch, schedule.places[chunk][1])) <= made
                assert actions.index(send) < actions.index(action)


def test_of_1f1b_all_but_the_last_sends_are_let_go_in_the_step():
    schedule = plan_1f1b(3, 8)
    sends = [action for action in schedule.actions[1] if action.op is Op.SEND]
    over = [send for found in schedule.sends_over[1].values() for send in found]
    assert set(sends) - set(over) == set(parse("sg5>0 sg6>0 sg7>0"))

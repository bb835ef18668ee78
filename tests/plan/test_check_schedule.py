"""The checker: accepts what is sound however it is written, refuses each way of breaking it, and says what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hpc_train.errors import ConfigError
from hpc_train.plan.check_schedule import check_pipelines, check_schedule
from hpc_train.plan.schedule import COLLECTIVES, TRANSFERS, Action, Op, Payload, Schedule
from hpc_train.plan.schedule_orders import plan_1f1b
from tests.plan.drawn_schedules import sound_schedules
from tests.plan.hand_schedules import BY_HAND, EVERYTHING_ELSE, is_sound, written


def _with_list(schedule: Schedule, stage: int, actions: list[Action]) -> Schedule:
    return replace(schedule, actions=(*schedule.actions[:stage], tuple(actions), *schedule.actions[stage + 1 :]))


def _is_accepted(schedule: Schedule) -> bool:
    try:
        check_schedule(schedule)
    except ConfigError:
        return False
    return True


@st.composite
def places_in_schedules(draw: st.DrawFn) -> tuple[Schedule, int, int]:
    """A sound schedule, a stage of it and a place in the stage's list."""
    schedule = draw(sound_schedules())
    stage = draw(st.integers(0, schedule.num_stages - 1))
    return schedule, stage, draw(st.integers(0, len(schedule.actions[stage]) - 1))


@pytest.mark.parametrize("name", BY_HAND)
def test_schedules_written_by_hand_are_accepted(name):
    assert is_sound(BY_HAND[name])
    check_schedule(BY_HAND[name])


# Legal moves: posting earlier never hurts, nor does a W that is done at another time.


def _may_swap(first: Action, then: Action) -> bool:
    same_channel = first.op is then.op and first.peer == then.peer
    if then.op is Op.RECV:
        return not same_channel
    if then.op is Op.SEND:
        maker = Action(Op.F if then.payload is Payload.ACTIVATION else Op.B, then.micro_batch, then.model_chunk)
        return not same_channel and first != maker
    if Op.W in (first.op, then.op):
        other = then if first.op is Op.W else first
        return other != Action(Op.B, then.micro_batch, then.model_chunk) and other.op is not Op.REDUCE_SCATTER
    return False


@given(sound_schedules(), st.data())
def test_a_schedule_stays_sound_when_posts_move_ahead_and_weight_gradients_move_at_all(schedule, data):
    for _ in range(data.draw(st.integers(1, 12))):
        moves = [
            (stage, place)
            for stage, actions in enumerate(schedule.actions)
            for place in range(len(actions) - 1)
            if _may_swap(actions[place], actions[place + 1])
        ]
        assume(moves)
        stage, place = data.draw(st.sampled_from(moves))
        actions = list(schedule.actions[stage])
        actions[place : place + 2] = reversed(actions[place : place + 2])
        schedule = _with_list(schedule, stage, actions)
    check_schedule(schedule)


@given(sound_schedules(), st.data())
def test_in_any_order_a_schedule_is_accepted_just_when_its_waits_have_no_cycle(schedule, data):
    for _ in range(data.draw(st.integers(1, 6))):
        stage = data.draw(st.integers(0, schedule.num_stages - 1))
        actions = list(schedule.actions[stage])
        moved = actions.pop(data.draw(st.integers(0, len(actions) - 1)))
        actions.insert(data.draw(st.integers(0, len(actions))), moved)
        schedule = _with_list(schedule, stage, actions)
    assert _is_accepted(schedule) == is_sound(schedule)


# Mutations. Each leaves a schedule that must be refused.


@given(places_in_schedules())
def test_a_lost_action_is_refused(drawn):
    schedule, stage, place = drawn
    lost = schedule.actions[stage][place]
    others = [action.op for actions in schedule.actions for action in actions].count(lost.op) - 1
    assume(others or lost.op is not Op.W)  # Without any W left, B is the whole backward.
    actions = list(schedule.actions[stage])
    del actions[place]
    with pytest.raises(ConfigError, match=f"stage {stage}: .*(is missing|has no)"):
        check_schedule(_with_list(schedule, stage, actions))


@given(places_in_schedules(), st.data())
def test_an_action_done_twice_is_refused(drawn, data):
    schedule, stage, place = drawn
    actions = list(schedule.actions[stage])
    actions.insert(data.draw(st.integers(0, len(actions))), actions[place])
    with pytest.raises(ConfigError, match=f"stage {stage}: .* is in the list twice"):
        check_schedule(_with_list(schedule, stage, actions))


@given(places_in_schedules(), st.integers(-1, 4))
def test_a_message_to_or_from_another_stage_is_refused(drawn, peer):
    schedule, stage, place = drawn
    action = schedule.actions[stage][place]
    assume(action.op in TRANSFERS and action.peer != peer)
    actions = list(schedule.actions[stage])
    actions[place] = replace(action, peer=peer)
    with pytest.raises(ConfigError, match=f"stage {stage}: .* belongs with stage {action.peer}"):
        check_schedule(_with_list(schedule, stage, actions))


@given(places_in_schedules(), st.integers(-1, 7), st.integers(-1, 2), st.sampled_from(Payload))
def test_an_action_of_another_micro_batch_chunk_or_payload_is_refused(drawn, micro_batch, model_chunk, payload):
    schedule, stage, place = drawn
    action = schedule.actions[stage][place]
    other = replace(
        action,
        micro_batch=None if action.op in COLLECTIVES else micro_batch,
        model_chunk=model_chunk,
        payload=payload if action.op in TRANSFERS else None,
    )
    assume(other != action)
    actions = list(schedule.actions[stage])
    actions[place] = other
    assert not _is_accepted(_with_list(schedule, stage, actions))


@given(sound_schedules(), st.data())
def test_two_messages_of_a_channel_that_change_places_on_one_side_are_refused(schedule, data):
    pairs = [
        (stage, place, other)
        for stage, actions in enumerate(schedule.actions)
        for place, action in enumerate(actions)
        for other in range(place + 1, len(actions))
        if action.op in TRANSFERS and (actions[other].op, actions[other].peer) == (action.op, action.peer)
    ]
    assume(pairs)
    stage, place, other = data.draw(st.sampled_from(pairs))
    actions = list(schedule.actions[stage])
    actions[place], actions[other] = actions[other], actions[place]
    with pytest.raises(ConfigError, match=r"must come after|match by their order"):
        check_schedule(_with_list(schedule, stage, actions))


@given(st.integers(2, 5), st.integers(0, 4), st.data())
def test_sends_held_back_until_their_answer_is_there_deadlock(num_stages, more, data):
    schedule = plan_1f1b(num_stages, num_stages + more)
    stage = data.draw(st.integers(0, num_stages - 2))
    index = data.draw(st.integers(0, schedule.num_micro_batches - 1))
    actions = list(schedule.actions[stage])
    first = actions.index(Action(Op.SEND, index, 0, stage + 1, Payload.ACTIVATION))
    backward = actions.index(Action(Op.B, index))
    between = actions[first:backward]
    held = [action for action in between if action.op is Op.SEND and action.peer == stage + 1]
    actions[first : backward + 1] = [*(action for action in between if action not in held), Action(Op.B, index), *held]
    with pytest.raises(ConfigError, match=f"deadlocks: .*stage {stage} waits for gradient "):
        check_schedule(_with_list(schedule, stage, actions))


# What is said.


ONE_STAGE_EACH = ((0,), (1,))
STAGE_0 = "F0 sa0>1 F1 sa1>1 rg0<1 B0 rg1<1 B1"
STAGE_1 = "ra0<0 F0 B0 sg0>0 ra1<0 F1 B1 sg1>0"


@pytest.mark.parametrize(
    ("stage_0", "stage_1", "said"),
    [
        (
            STAGE_0,
            STAGE_1.replace("F1 ", ""),
            "stage 1: the forward of micro-batch 1 is missing, so the micro-batch is",
        ),
        (STAGE_0 + " B1", STAGE_1, "stage 0: the backward of micro-batch 1 is in the list twice, at 7 and 8"),
        (STAGE_0.replace("sa1>1 ", ""), STAGE_1, "stage 0: the send of activation 1 to stage 1 is missing, which is"),
        (STAGE_0, STAGE_1.replace("ra1<0 ", ""), "stage 1: the recv of activation 1 from stage 0 is missing, which is"),
        (
            STAGE_0.replace("rg0<1", "rg0<0"),
            STAGE_1,
            "stage 0: the recv of gradient 0 from stage 0 belongs with stage 1",
        ),
        (STAGE_0, STAGE_1 + " sa1>0", "stage 1: the send of activation 1 to stage 0 has no use"),
        (STAGE_0 + " F2", STAGE_1, "stage 0: the forward of micro-batch 2: there are 2 micro-batches"),
        (STAGE_0 + " W0.1", STAGE_1, "micro-batch 0 in model_chunk 1: there are 1 model_chunks a stage"),
        (STAGE_0 + " W0", STAGE_1, "stage 0: the weight gradient of micro-batch 1 is missing"),
        (STAGE_0 + " off0", STAGE_1, "stage 0: the offload of micro-batch 0 has no reload that belongs to it"),
        ("AG " + STAGE_0, STAGE_1, "stage 1: the all-gather of model_chunk 0 is missing, and other model_chunks have"),
        (
            STAGE_0,
            "ra0<0 B0 F0 sg0>0 ra1<0 F1 B1 sg1>0",
            "stage 1: the backward of micro-batch 0, at 1 of its list, must come after the forward of micro-batch 0",
        ),
        (
            STAGE_0,
            "ra1<0 F1 B1 sg1>0 ra0<0 F0 B0 sg0>0",
            "stage 0 sends activation 0 of chunk 0 to stage 1 where that one receives activation 1 of chunk 0 (number",
        ),
        (
            "F0 F1 rg0<1 B0 sa0>1 sa1>1 rg1<1 B1",
            STAGE_1,
            "the schedule deadlocks: stage 0 waits for gradient 0 of chunk 1 before the backward of micro-batch 0; "
            "stage 1 waits for activation 0 of chunk 0 before the forward of micro-batch 0",
        ),
    ],
)
def test_a_refusal_names_the_stage_and_what_is_wrong(stage_0, stage_1, said):
    with pytest.raises(ConfigError) as caught:
        check_schedule(written(2, ONE_STAGE_EACH, stage_0, stage_1))
    assert said in str(caught.value)


def test_a_deadlock_of_many_stages_names_the_first_and_counts_the_others():
    schedule = plan_1f1b(12, 12)
    send = Action(Op.SEND, 0, 0, 1, Payload.ACTIVATION)
    last = [*(action for action in schedule.actions[0] if action.op is not Op.SEND)]
    last += [action for action in schedule.actions[0] if action.op is Op.SEND]
    assert send in last
    with pytest.raises(ConfigError, match=r"deadlocks: stage 0 waits .*; stage 7 waits [^;]*; and 4 more$"):
        check_schedule(_with_list(schedule, 0, last))


def test_too_few_micro_batches_for_the_schedule_are_refused():
    with pytest.raises(ConfigError, match="2 stages: the schedule has 4 micro-batches a step and needs at least 5"):
        check_schedule(replace(plan_1f1b(2, 4), min_micro_batches=5))
    with pytest.raises(ConfigError, match="has 0 micro-batches a step and needs at least 1"):
        check_schedule(Schedule(0, ((0,),), ((),)))


# Pipelines side by side.


def _with_collectives(schedule: Schedule) -> Schedule:
    gather, scatter = Action(Op.ALL_GATHER), Action(Op.REDUCE_SCATTER)
    return replace(schedule, actions=tuple((gather, *actions, scatter) for actions in schedule.actions))


@given(st.integers(1, 4), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_pipelines_with_their_own_numbers_of_micro_batches_meet_in_collectives(num_stages, more):
    check_pipelines([_with_collectives(plan_1f1b(num_stages, num_stages + extra)) for extra in more])


def test_pipelines_that_do_not_have_the_same_collectives_are_refused():
    plain = plan_1f1b(2, 2)
    with pytest.raises(
        ConfigError, match=r"stage 0 of pipeline 1 has all_gather of chunk 0 as number 0 .*pipeline 0 has"
    ):
        check_pipelines([plain, _with_collectives(plain)])


def _gathering(line: str) -> Schedule:
    return written(1, ((0, 1),), line)


def test_pipelines_that_order_their_collectives_differently_are_refused():
    first = _gathering("AG AG.1 F0 F0.1 B0.1 B0")
    second = _gathering("AG.1 AG F0 F0.1 B0.1 B0")
    check_pipelines([first, _gathering("AG F0 AG.1 F0.1 B0.1 B0")])
    with pytest.raises(
        ConfigError, match="number 0 of the collectives is all_gather of chunk 0 on stage 0 of pipeline 0"
    ):
        check_pipelines([first, second])


def test_a_fault_of_one_pipeline_is_said_with_its_number():
    broken = _with_list(EVERYTHING_ELSE, 0, list(EVERYTHING_ELSE.actions[0][:-2]))
    with pytest.raises(ConfigError, match="pipeline 1, stage 0: "):
        check_pipelines([EVERYTHING_ELSE, broken])


def test_pipelines_of_different_shape_or_none_are_refused():
    with pytest.raises(ConfigError, match="hold different chunks"):
        check_pipelines([plan_1f1b(2, 3), plan_1f1b(3, 3)])
    with pytest.raises(ConfigError, match="no schedule"):
        check_pipelines([])

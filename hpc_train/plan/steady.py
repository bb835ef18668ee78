"""How long a step takes among others like it, where each begins gathers that the next one needs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from hpc_train.plan.play import Channel, Post, Step, play
from hpc_train.plan.schedule import Action, Op, Schedule
from hpc_train.plan.schedule_steps import Content, Costs, pipeline_steps

PLAYED_STEPS = 5
"""Steps in a row; the first two are warm-up (assumed: backlogs of the line settle within them)."""
_WARM_UP = 2


def without_needless_gathers(schedule: Schedule) -> Schedule:
    """The list as it is carried out once steps follow one another: what was gathered early is not gathered again."""
    lists = []
    for actions in schedule.actions:
        early = {action.model_chunk for action in actions if action.op is Op.UPDATE}
        lists.append(tuple(a for a in actions if a.op is not Op.ALL_GATHER or a.model_chunk not in early))
    return Schedule(schedule.num_micro_batches, schedule.chunks, tuple(lists), schedule.min_micro_batches)


def step_period(schedule: Schedule, costs: Costs) -> int:
    """Mean time from the end of a step to that of the next one, in the unit of the costs.

    A step ends when all stages have all their sums and so know the norm of all gradients; gathers for the next step
    go on meanwhile.
    """
    schedule = without_needless_gathers(schedule)
    played = play([_repeated(schedule, stage, steps) for stage, steps in enumerate(pipeline_steps([schedule], costs))])
    if played.stuck:
        raise ValueError("the schedule deadlocks; check_schedule says where")
    # The last step of each list is the meeting at which the norm is known.
    length = len(schedule.actions[0]) + 1
    ends = [played.spans[0][(number + 1) * length - 1][1] for number in range(PLAYED_STEPS)]
    return (ends[-1] - ends[_WARM_UP - 1]) // (PLAYED_STEPS - _WARM_UP)


def _repeated(schedule: Schedule, stage: int, steps: list[Step]) -> list[Step]:
    """A stage's list several times over, its contents marked by the step's number."""
    chunks, actions = schedule.chunks[stage], schedule.actions[stage]
    early = {action.model_chunk for action in actions if action.op is Op.UPDATE}
    sums = [Content(Op.REDUCE_SCATTER, chunks[a.model_chunk]) for a in actions if a.op is Op.REDUCE_SCATTER]
    everyone = Channel("norm", tuple(range(schedule.num_stages)))
    repeated: list[Step] = []
    for number in range(PLAYED_STEPS):
        for index, (action, step) in enumerate(zip(actions, steps, strict=True)):
            waits: list[Hashable] = [(number, content) for content in step.waits]
            if number:
                waits += [(number - 1, "norm")] if index == 0 else []
                waits += [(number - 1, content) for content in _gathered_before(action, chunks, early)]
            post = step.post and replace(step.post, content=(number, step.post.content))
            repeated.append(Step(tuple(waits), step.busy, post))
        meeting = Post(everyone, (number, "norm"))
        repeated.append(Step(tuple((number, content) for content in sums), 0, meeting))
    return repeated


def _gathered_before(action: Action, chunks: tuple[int, ...], early: set[int]) -> list[Content]:
    """What a forward waits for of what the step before has begun."""
    if action.op is Op.F and action.model_chunk in early:
        return [Content(Op.UPDATE, chunks[action.model_chunk])]
    return []

"""How long a step takes among others like it, where each begins gathers that the next one needs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

from hpc_train.plan.play import Channel, Post, Step, find_course
from hpc_train.plan.schedule import Action, Op, Schedule
from hpc_train.plan.schedule_steps import Content, Costs, pipeline_steps
from hpc_train.plan.simulate import times_of

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


@final
class StepPeriods:
    """The mean time from the end of a step to that of the next one, with one cost after another.

    A step ends when all stages have all their sums and so know the norm of all gradients; gathers for the next step
    go on meanwhile.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = without_needless_gathers(schedule)
        steps = pipeline_steps([self._schedule])
        numbers: dict[Hashable, int] = {}
        lists = [_repeated(self._schedule, stage, of_stage, numbers) for stage, of_stage in enumerate(steps)]
        self._course = find_course(lists)
        if self._course.stuck:
            raise ValueError("the schedule deadlocks; check_schedule says where")

    def of(self, costs: Costs) -> int:
        """In the unit of the costs."""
        busy, durations = (
            [[*of_stage, 0] * PLAYED_STEPS for of_stage in of_stages] for of_stages in times_of(self._schedule, costs)
        )
        ends = self._course.ends(busy, durations)
        # The last action of each list is the meeting at which the norm is known.
        length = len(self._schedule.actions[0]) + 1
        known = [ends[event] for event in self._course.steps[0][length - 1 :: length]]
        return (known[-1] - known[_WARM_UP - 1]) // (PLAYED_STEPS - _WARM_UP)


def _repeated(schedule: Schedule, stage: int, steps: list[Step], numbers: dict[Hashable, int]) -> list[Step]:
    """A stage's list several times over. numbers: of the contents of all stages, in whose place they stand here, apart
    for each step.
    """

    def numbered(content: Hashable) -> int:
        return PLAYED_STEPS * numbers.setdefault(content, len(numbers))

    chunks, actions = schedule.chunks[stage], schedule.actions[stage]
    early = {action.model_chunk for action in actions if action.op is Op.UPDATE}
    sums = [Content(Op.REDUCE_SCATTER, chunks[a.model_chunk]) for a in actions if a.op is Op.REDUCE_SCATTER]
    norm, everyone = numbered("norm"), Channel("norm", tuple(range(schedule.num_stages)))
    columns = [
        (
            [numbered(content) for content in step.waits],
            ([] if index else [norm]) + [numbered(content) for content in _gathered_before(action, chunks, early)],
            step.post and (step.post.channel, numbered(step.post.content), step.post.queue),
        )
        for index, (action, step) in enumerate(zip(actions, steps, strict=True))
    ]
    columns.append(([numbered(content) for content in sums], [], (everyone, norm, None)))
    repeated: list[Step] = []
    for number in range(PLAYED_STEPS):
        for now, before, post in columns:
            waits = [content + number for content in now]
            if number and before:
                waits += [content + number - 1 for content in before]
            repeated.append(Step(tuple(waits), 0, post and Post(post[0], post[1] + number, 0, post[2])))
    return repeated


def _gathered_before(action: Action, chunks: tuple[int, ...], early: set[int]) -> list[Content]:
    """What a forward waits for of what the step before has begun."""
    if action.op is Op.F and action.model_chunk in early:
        return [Content(Op.UPDATE, chunks[action.model_chunk])]
    return []

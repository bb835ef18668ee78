"""How long a schedule takes: each stage's busy time, the makespan and the bubble, from a cost for each action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from hpc_train.plan.play import find_course, play
from hpc_train.plan.schedule import COMPUTE, Action, Op, Schedule
from hpc_train.plan.schedule_steps import Costs, pipeline_steps


@dataclass(frozen=True)
class Simulation:
    """spans: start and end of each action of each stage; of a send or another post, when it was posted.

    busy: time a stage spends in F, B and W. makespan: until every stage has done its list and all it sent is gone.
    """

    spans: tuple[tuple[tuple[int, int], ...], ...]
    busy: tuple[int, ...]
    makespan: int

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they do not compute."""
        whole = self.makespan * len(self.busy)
        return (whole - sum(self.busy)) / whole if whole else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Play a schedule that `check_schedule` accepts; its transfers run beside the stages' work.

    Messages of one direction follow one another; collectives are taken to find the other pipelines ready.
    """
    played = play(pipeline_steps([schedule], costs))
    if played.stuck:
        raise ValueError("the schedule deadlocks; check_schedule says where")
    busy = tuple(
        sum(end - start for action, (start, end) in zip(actions, spans, strict=True) if action.op in COMPUTE)
        for actions, spans in zip(schedule.actions, played.spans, strict=True)
    )
    return Simulation(played.spans, busy, max(played.ends))


@final
class Makespans:
    """The makespans of a schedule with one cost after another: what waits for what is found once for all of them.

    The first one takes as long as `simulate`, a further one a tenth of that.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._course = find_course(pipeline_steps([schedule]))
        if self._course.stuck:
            raise ValueError("the schedule deadlocks; check_schedule says where")

    def of(self, costs: Costs) -> int:
        """That of `simulate`."""
        return max(self._course.ends(*times_of(self._schedule, costs)), default=0)


def times_of(schedule: Schedule, costs: Costs) -> tuple[list[list[int]], list[list[int]]]:
    """Of each action of each stage, how long it is busy, and how long what it posts takes: as `pipeline_steps` has."""
    busy, durations = [], []
    for stage, actions in enumerate(schedule.actions):
        times = [0 if action.op is Op.RECV else costs(stage, action) for action in actions]
        is_work = [action.op in COMPUTE for action in actions]
        busy.append([time if works else 0 for time, works in zip(times, is_work, strict=True)])
        durations.append([0 if works else time for time, works in zip(times, is_work, strict=True)])
    return busy, durations


def time_of_work(work: Sequence[Sequence[Action]], chunks: Sequence[Sequence[int]], costs: Costs) -> int:
    """The makespan of the schedule of this work if its messages take no time: that of `simulate`, some 20 times sooner.

    work: the F, B and W of each stage, in an order that does not deadlock.
    """
    num_chunks = sum(map(len, chunks))
    # When F and B of each global chunk were done, by micro-batch; which stage waits for one that is not done yet.
    done: dict[Op, list[dict[int | None, int]]] = {op: [{} for _ in range(num_chunks)] for op in (Op.F, Op.B)}
    waiting: dict[tuple[Op, int, int | None], int] = {}
    clocks, todo = [0] * len(chunks), [iter(actions) for actions in work]
    heads = [next(actions, None) for actions in todo]
    ready = list(range(len(chunks)))
    while ready:
        stage = ready.pop()
        action, now, held = heads[stage], clocks[stage], chunks[stage]
        while action is not None:
            op, micro_batch = action.op, action.micro_batch
            if op is Op.W:
                now += costs(stage, action)
                action = next(todo[stage], None)
                continue
            chunk = held[action.model_chunk]
            source = chunk - 1 if op is Op.F else chunk + 1
            if 0 <= source < num_chunks:
                come = done[op][source].get(micro_batch)
                if come is None:
                    waiting[op, source, micro_batch] = stage
                    break
                if come > now:
                    now = come
            now += costs(stage, action)
            done[op][chunk][micro_batch] = now
            if (op, chunk, micro_batch) in waiting:
                ready.append(waiting.pop((op, chunk, micro_batch)))
            action = next(todo[stage], None)
        heads[stage], clocks[stage] = action, now
    if waiting:
        raise ValueError("the work deadlocks; check_schedule says where")
    return max(clocks)

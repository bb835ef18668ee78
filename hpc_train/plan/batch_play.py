"""Plays a batch plan's rings together with the schedules of all pipelines: who waits for whom, and how long it takes.

An hdp rank is then a pipeline, and a ring of D ranks is a ring of D stages in each stage's forward and in its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hpc_train.errors import ConfigError
from hpc_train.plan.batch import BatchPlan
from hpc_train.plan.play import Channel, Played, Post, Step, play
from hpc_train.plan.schedule import COMPUTE, Action, Op, Schedule
from hpc_train.plan.schedule_steps import pipeline_steps

MAX_NAMED = 8
"""Stages that a message about a deadlock names."""

Durations = Callable[[int, Action], int]
"""Time of an F or B of an hdp rank's pipeline, the same for all of its stages."""


def check_rings(plan: BatchPlan, schedules: Sequence[Schedule]) -> None:
    """Refuse a plan whose rings make pipelines wait for each other for ever. schedules: of each hdp rank.

    Raises:
        ConfigError: a schedule has not as many micro-batches as its rank, or a deadlock, with the stages concerned.
    """
    stuck = play_rings(plan, schedules).stuck
    if stuck:
        num_stages = schedules[0].num_stages
        named = [
            f"stage {found.process % num_stages} of hdp rank {found.process // num_stages} waits for {found.content}"
            for found in stuck[:MAX_NAMED]
        ]
        more = [f"and {len(stuck) - MAX_NAMED} more"] if len(stuck) > MAX_NAMED else []
        raise ConfigError("the rings of the batch plan deadlock: " + "; ".join(named + more))


def play_rings(plan: BatchPlan, schedules: Sequence[Schedule], durations: Durations = lambda rank, action: 0) -> Played:
    """Play all pipelines. An F or B of a ring begins when all members are at it, and the slowest counts for all.

    Raises:
        ConfigError: a schedule has not as many micro-batches as its rank.
    """
    found, wanted = [schedule.num_micro_batches for schedule in schedules], [len(rank) for rank in plan.ranks]
    if found != wanted:
        raise ConfigError(f"the schedules have {found} micro-batches, and the batch plan gives its ranks {wanted}")
    num_stages = schedules[0].num_stages
    processes = []
    for process, steps in enumerate(pipeline_steps(schedules)):
        rank, stage = divmod(process, num_stages)
        actions = schedules[rank].actions[stage]
        processes.append(
            [
                step
                for action, plain in zip(actions, steps, strict=True)
                for step in _steps(plan, action, plain, process, num_stages, durations)
            ]
        )
    return play(processes)


def _steps(
    plan: BatchPlan, action: Action, plain: Step, process: int, num_stages: int, durations: Durations
) -> Iterator[Step]:
    """An action's step, and the meeting of its ring."""
    if action.op not in COMPUTE or action.micro_batch is None:
        yield plain
        return
    rank, stage = divmod(process, num_stages)
    ring = plan.ranks[rank][action.micro_batch].ring
    duration = durations(rank, action)
    # The backward of the weights needs no other rank's keys and values.
    if ring is None or action.op is Op.W:
        yield Step(plain.waits, duration, plain.post)
        return
    content = f"{action.op} of ring {ring.order} in model_chunk {action.model_chunk}"
    channel = Channel((content, stage), tuple(member * num_stages + stage for member in ring.ranks))
    yield Step(plain.waits, 0, Post(channel, content, duration))
    yield Step((content,), 0, plain.post)

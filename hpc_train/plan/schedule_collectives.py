"""Where a stage's list gathers the parameters of its model_chunks and sums their gradients over data parallel ranks.

A chunk has exactly one of each a step. All gathers stand at the head of the list, in the order in which forwards need
them: they are done one after another, so the first one is there soonest, and no forward in between delays the next one.
A sum stands behind the last backward of its chunk (its last W where backwards are split) and behind the message that
this backward makes, for which another stage waits.
"""

from __future__ import annotations

from functools import lru_cache

from hpc_train.plan.schedule import Action, Op, Payload, Schedule
from hpc_train.plan.schedule_orders import Kind, plan_forward_only, plan_schedule


@lru_cache(maxsize=8)
def plan_training(
    kind: Kind, num_stages: int, num_micro_batches: int, virtual_stages: int = 1, *, has_tied: bool = False
) -> Schedule:
    """All of a step: `plan_schedule`'s plan with its collectives.

    Raises:
        ConfigError: fewer micro-batches than stages, with what would work.
    """
    plan = plan_schedule(kind, num_stages, num_micro_batches, virtual_stages)
    return add_collectives(plan, has_tied=has_tied)


@lru_cache(maxsize=8)
def plan_evaluation(num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Forwards alone, with the gathers of what they need."""
    return add_collectives(plan_forward_only(num_stages, num_micro_batches, virtual_stages))


def add_collectives(schedule: Schedule, *, has_tied: bool = False) -> Schedule:
    """The schedule with an all-gather of each model_chunk and, where it has backwards, a reduce-scatter.

    has_tied: the first and the last chunk hold a copy each of one parameter. Its gradients must be added before they
    are summed over data parallel ranks, and the first chunk's is the last one that there is: so the last chunk's sum
    stands at the end of its list.
    """
    actions = tuple(_with_collectives(schedule, stage, has_tied) for stage in range(schedule.num_stages))
    return Schedule(schedule.num_micro_batches, schedule.chunks, actions, schedule.min_micro_batches)


def _with_collectives(schedule: Schedule, stage: int, has_tied: bool) -> tuple[Action, ...]:
    actions = schedule.actions[stage]
    forwards = dict.fromkeys(action.model_chunk for action in actions if action.op is Op.F)
    last: dict[int, int] = {}
    for index, action in enumerate(actions):
        if action.op in (Op.B, Op.W) or (action.payload is Payload.GRADIENT and action.op is Op.SEND):
            last[action.model_chunk] = index
    last_chunk = schedule.num_global_chunks - 1
    if has_tied and last_chunk > 0 and schedule.places[last_chunk][0] == stage and last:
        last[schedule.places[last_chunk][1]] = len(actions)
    sums: dict[int, list[Action]] = {}
    for own, index in last.items():
        sums.setdefault(index, []).append(Action(Op.REDUCE_SCATTER, model_chunk=own))
    done = [entry for index, action in enumerate(actions) for entry in (action, *sums.get(index, ()))]
    gathers = [Action(Op.ALL_GATHER, model_chunk=own) for own in forwards]
    return (*gathers, *done, *sums.get(len(actions), ()))

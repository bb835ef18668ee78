"""Where a stage's list gathers the parameters of its model_chunks and sums their gradients over data parallel ranks.

A chunk has exactly one of each a step. All gathers stand at the head of the list, in the order in which forwards need
them: they are done one after another, so the first one is there soonest, and no forward in between delays the next one.
A sum stands behind the last backward of its chunk (its last W where backwards are split) and behind the message that
this backward makes, for which another stage waits.

With early updates every third chunk is updated as soon as its sum is there, without waiting for the norm of all
gradients, and its gather for the next step begins at once: behind the sum of the chunk whose backward hid its own. The
gather at the head of the next list then has nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from hpc_train.config import Config
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.schedule import Action, Op, Payload, Schedule, StageLists
from hpc_train.plan.schedule_orders import Kind, plan_forward_only, plan_schedule

EARLY_EVERY = 3
"""Of how many model_chunks one is updated early.

Derived, for equal chunks whose gathers and sums take equally long: forwards are then beside two thirds of the gathers,
backwards, twice as long, beside all sums and a third of the gathers, twice as much. So both hide what they can while
communication takes no longer than compute. One more early gather would hold up sums, for which the norm waits.
"""


@lru_cache(maxsize=8)
def plan_training(
    kind: Kind,
    num_stages: int,
    num_micro_batches: int,
    virtual_stages: int = 1,
    *,
    has_tied: bool = False,
    early_updates: bool = False,
) -> Schedule:
    """All of a step: `plan_schedule`'s plan with its collectives and, if wished, early updates. Steps have mostly the
    same one, so some are remembered.

    Raises:
        ConfigError: fewer micro-batches than stages, with what would work.
    """
    plan = plan_schedule(kind, num_stages, num_micro_batches, virtual_stages)
    return add_collectives(plan, has_tied=has_tied, early_updates=early_updates)


@lru_cache(maxsize=8)
def plan_evaluation(num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Forwards alone, with the gathers of what they need."""
    return add_collectives(plan_forward_only(num_stages, num_micro_batches, virtual_stages))


def updates_early(config: Config, mesh: Mesh) -> bool:
    """Whether steps of a run may have early updates: as parallel.early_updates says or, left out, where it can be."""
    parallel = config.parallel
    if parallel.early_updates is None:
        return parallel.overlap and config.optimizer.name == "adamw" and mesh.dp * mesh.cp > 1
    return parallel.early_updates


def early_chunks(num_model_chunks: int, *, has_tied_last: bool) -> tuple[int, ...]:
    """Of a stage's model_chunks, in the order of forwards, those that a step with early updates updates early.

    has_tied_last: the last one has tied embeddings, whose sum is the last that there is.
    """
    return tuple(range(EARLY_EVERY, num_model_chunks - has_tied_last, EARLY_EVERY))


def add_collectives(schedule: Schedule, *, has_tied: bool = False, early_updates: bool = False) -> Schedule:
    """The schedule with an all-gather of each model_chunk and, where it has backwards, a reduce-scatter.

    has_tied: the first and the last chunk hold a copy each of one parameter. Its gradients must be added before they
    are summed over data parallel ranks, and the first chunk's is the last one that there is: so the last chunk's sum
    stands at the end of its list.
    """

    def actions_of(stage: int) -> Sequence[Action]:
        return _with_collectives(schedule, stage, has_tied, early_updates)

    return replace(schedule, actions=StageLists(schedule.num_stages, actions_of))


def _with_collectives(schedule: Schedule, stage: int, has_tied: bool, early_updates: bool) -> tuple[Action, ...]:
    actions = schedule.actions[stage]
    forwards = dict.fromkeys(action.model_chunk for action in actions if action.op is Op.F)
    last: dict[int, int] = {}
    for index, action in enumerate(actions):
        if action.op in (Op.B, Op.W) or (action.payload is Payload.GRADIENT and action.op is Op.SEND):
            last[action.model_chunk] = index
    last_chunk = schedule.num_global_chunks - 1
    has_tied_last = has_tied and last_chunk > 0 and schedule.places[last_chunk][0] == stage
    if has_tied_last and last:
        last[schedule.places[last_chunk][1]] = len(actions)
    early = early_chunks(schedule.num_model_chunks, has_tied_last=has_tied_last) if early_updates else ()
    sums: dict[int, list[Action]] = {}
    summed = sorted(last, key=lambda own: last[own])
    for own, before in zip(summed, (None, *summed), strict=False):
        sums.setdefault(last[own], []).append(Action(Op.REDUCE_SCATTER, model_chunk=own))
        if before is not None and before in early:
            sums[last[own]].append(Action(Op.UPDATE, model_chunk=before))
    done = [Action(Op.ALL_GATHER, model_chunk=own) for own in forwards]
    taken = 0
    for index in sorted(sums):
        done += [*actions[taken : index + 1], *sums[index]]
        taken = index + 1
    return (*done, *actions[taken:])

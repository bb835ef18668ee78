"""Refuses a schedule that would hang, lose work or mix up messages, with the stages and micro-batches concerned.

First each stage's list by itself: what it must hold, once each, and in which order. Then the lists together: the
order of messages in each channel, and a play of all of them that finds every deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpc_train.errors import ConfigError
from hpc_train.plan.play import Mismatch, Stuck, find_mismatch, play
from hpc_train.plan.schedule import COLLECTIVES, COMPUTE, TRANSFERS, Action, Op, Payload, Schedule
from hpc_train.plan.schedule_steps import Process, pipeline_steps

MAX_NAMED = 8
"""Stages that a message about a deadlock names."""


def check_schedule(schedule: Schedule) -> None:
    """Refuse what `check_pipelines` refuses, for a pipeline that meets no other one."""
    check_pipelines([schedule])


def check_pipelines(schedules: Sequence[Schedule]) -> None:
    """Refuse schedules of pipelines that run side by side and meet in the collectives of equal stages.

    Each pipeline may have its own number of micro-batches. A send is taken to end only when its receive has been
    posted, as large messages do in NCCL and gloo.

    Raises:
        ConfigError: too few micro-batches; a micro-batch that a chunk never takes or takes twice; a send without its
            receive or the other way round, or with the wrong stage; an action before one that it needs; messages of
            a channel received in another order than sent; collectives in another order; a deadlock.
    """
    if not schedules:
        raise ConfigError("there is no schedule to check; give one for each pipeline")
    if any(schedule.chunks != schedules[0].chunks for schedule in schedules):
        raise ConfigError("the pipelines' stages hold different chunks; pipelines that run side by side hold the same")
    for pipeline, schedule in enumerate(schedules):
        prefix = f"pipeline {pipeline}, " if len(schedules) > 1 else ""
        if schedule.num_micro_batches < max(1, schedule.min_micro_batches):
            raise ConfigError(
                f"{prefix}{schedule.num_stages} stages: the schedule has {schedule.num_micro_batches} micro-batches a "
                f"step and needs at least {max(1, schedule.min_micro_batches)}. Give it more micro-batches (a larger "
                "train.global_batch_size, a smaller train.micro_batch_size or parallel.dp) or fewer stages."
            )
        for stage in range(schedule.num_stages):
            try:
                _check_stage(schedule, stage)
            except _Fault as fault:
                raise ConfigError(f"{prefix}stage {stage}: {fault}") from None
    _check_together(schedules)


def check_in_order(schedule: Schedule) -> None:
    """Refuse a sound schedule that hangs where each direction of its transfers is one communicator of NCCL.

    A stage's transfers UP then run one after another in the order of its list, whomever they are with, and those DOWN
    likewise: a receive that is posted early holds up a send behind it.

    Raises:
        ConfigError: a deadlock, with the stages concerned.
    """
    _check_play([schedule], one_queue_each_way=True)


class _Fault(Exception):
    """What is wrong with one stage's list, before it is said which one."""


def _key(action: Action) -> Action:
    """The action without its peer, which may be wrong."""
    if action.op in TRANSFERS:
        return Action(action.op, action.micro_batch, action.model_chunk, -1, action.payload)
    return action


def _check_stage(schedule: Schedule, stage: int) -> None:
    """The stage's list by itself: nothing foreign, everything once, the right peers, in an order that can be done."""
    places: dict[Action, int] = {}
    for place, action in enumerate(schedule.actions[stage]):
        if not 0 <= action.model_chunk < schedule.num_model_chunks:
            raise _Fault(f"{action.describe()}: there are {schedule.num_model_chunks} model_chunks a stage")
        if action.micro_batch is not None and not 0 <= action.micro_batch < schedule.num_micro_batches:
            raise _Fault(f"{action.describe()}: there are {schedule.num_micro_batches} micro-batches")
        if _key(action) in places:
            raise _Fault(f"{action.describe()} is in the list twice, at {places[_key(action)]} and {place}")
        places[_key(action)] = place
    needed = {_key(action): action for action in _needed(schedule, stage)}
    for key, action in needed.items():
        if key not in places:
            raise _Fault(_missing(action))
        found = schedule.actions[stage][places[key]]
        if found != action:
            raise _Fault(f"{found.describe()} belongs with stage {action.peer}")
    for key, place in places.items():
        if key not in needed and key.op in COMPUTE | TRANSFERS:
            raise _Fault(f"{schedule.actions[stage][place].describe()} has no use: no stage needs it there")
    _check_pairs(places)
    for first, then in _orders(schedule, stage):
        if first in places and then in places and places[first] > places[then]:
            before, after = (schedule.actions[stage][places[key]].describe() for key in (then, first))
            raise _Fault(f"{before}, at {places[then]} of its list, must come after {after}, at {places[first]}")


def _needed(schedule: Schedule, stage: int) -> Iterator[Action]:
    """Every action that this stage's list must hold once, with the right peers."""
    used = {action.op for actions in schedule.actions for action in actions}
    for own, chunk in enumerate(schedule.chunks[stage]):
        for op in sorted((COLLECTIVES - {Op.UPDATE}) & used):
            yield Action(op, model_chunk=own)
        for micro_batch in range(schedule.num_micro_batches):
            yield Action(Op.F, micro_batch, own)
            yield Action(Op.B, micro_batch, own)
            if schedule.splits_backward:
                yield Action(Op.W, micro_batch, own)
            # The chunk above (toward the loss) takes activations and gives gradients, the one below the opposite.
            above, below = (Op.SEND, Op.RECV), (Op.RECV, Op.SEND)
            for neighbour, ops in ((chunk + 1, above), (chunk - 1, below)):
                if not 0 <= neighbour < schedule.num_global_chunks:
                    continue
                peer = schedule.places[neighbour][0]
                if peer != stage:
                    for op, payload in zip(ops, (Payload.ACTIVATION, Payload.GRADIENT), strict=True):
                        yield Action(op, micro_batch, own, peer, payload)


def _missing(action: Action) -> str:
    if action.op is Op.SEND:
        return f"{action.describe()} is missing, which is there to be received"
    if action.op is Op.RECV:
        return f"{action.describe()} is missing, which is there to be sent"
    if action.op in COLLECTIVES:
        return f"{action.describe()} is missing, and other model_chunks have one"
    return f"{action.describe()} is missing, so the micro-batch is lost"


def _check_pairs(places: dict[Action, int]) -> None:
    """What is moved off the device comes back, and only that."""
    for key in places:
        for op, partner in ((Op.OFFLOAD, Op.RELOAD), (Op.RELOAD, Op.OFFLOAD)):
            other = Action(partner, key.micro_batch, key.model_chunk) if key.op is op else None
            if other is not None and other not in places:
                raise _Fault(f"{key.describe()} has no {partner} that belongs to it")


def _orders(schedule: Schedule, stage: int) -> Iterator[tuple[Action, Action]]:
    """Pairs of actions of one stage where the first must come before the second, if both are there."""
    for own, chunk in enumerate(schedule.chunks[stage]):
        gather, scatter = Action(Op.ALL_GATHER, model_chunk=own), Action(Op.REDUCE_SCATTER, model_chunk=own)
        yield scatter, Action(Op.UPDATE, model_chunk=own)
        for index in range(schedule.num_micro_batches):
            forward, backward, weight = (Action(op, index, own) for op in (Op.F, Op.B, Op.W))
            offload, reload = Action(Op.OFFLOAD, index, own), Action(Op.RELOAD, index, own)
            yield gather, forward
            yield Action(Op.RECV, index, own, -1, Payload.ACTIVATION), forward
            yield forward, Action(Op.SEND, index, own, -1, Payload.ACTIVATION)
            yield forward, backward
            yield forward, offload
            yield offload, reload
            yield reload, backward
            yield Action(Op.RECV, index, own, -1, Payload.GRADIENT), backward
            yield backward, Action(Op.SEND, index, own, -1, Payload.GRADIENT)
            yield backward, weight
            yield backward, scatter
            yield weight, scatter
            if chunk + 1 < schedule.num_global_chunks and schedule.places[chunk + 1][0] == stage:
                above = schedule.places[chunk + 1][1]
                yield forward, Action(Op.F, index, above)
                yield Action(Op.B, index, above), backward


def _check_together(schedules: Sequence[Schedule]) -> None:
    mismatch = find_mismatch(pipeline_steps(schedules))
    if mismatch:
        raise ConfigError(_Names(schedules).mismatch(mismatch))
    _check_play(schedules, one_queue_each_way=False)


def _check_play(schedules: Sequence[Schedule], *, one_queue_each_way: bool) -> None:
    names = _Names(schedules)
    stuck = play(pipeline_steps(schedules, one_queue_each_way=one_queue_each_way)).stuck
    if stuck:
        named = [names.stuck(found) for found in stuck[:MAX_NAMED]]
        more = [f"and {len(stuck) - MAX_NAMED} more"] if len(stuck) > MAX_NAMED else []
        raise ConfigError("the schedule deadlocks: " + "; ".join(named + more))


class _Names:
    """Words for processes and what they do."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.schedules = schedules

    def process(self, process: int) -> Process:
        return Process.of(process, self.schedules[0].num_stages)

    def name(self, process: int) -> str:
        found = self.process(process)
        return f"stage {found.stage}" + (f" of pipeline {found.pipeline}" if len(self.schedules) > 1 else "")

    def mismatch(self, found: Mismatch) -> str:
        (first, content), (second, other) = found.first, found.second
        if content is None or other is None:
            joined, alone, missing = (first, content, second) if other is None else (second, other, first)
            return (
                f"{self.name(joined)} has {alone} as number {found.place} of its collectives, and {self.name(missing)} "
                f"has only {found.place}; all pipelines have the same ones"
            )
        if len({self.process(member).stage for member in found.channel.members}) == 1:
            return (
                f"number {found.place} of the collectives is {content} on {self.name(first)} and {other} on "
                f"{self.name(second)}; collectives match by their order"
            )
        return (
            f"{self.name(first)} sends {content} to {self.name(second)} where that one receives {other} (number "
            f"{found.place} of this direction); messages match by their order, so both lists need the same"
        )

    def stuck(self, found: Stuck) -> str:
        process = self.process(found.process)
        actions = self.schedules[process.pipeline].actions[process.stage]
        if found.step < len(actions):
            return f"{self.name(found.process)} waits for {found.content} before {actions[found.step].describe()}"
        return f"{self.name(found.process)} waits for {found.content} at its end"

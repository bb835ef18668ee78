"""Schedules as steps that can be played: what each action waits for, posts and costs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpc_train.plan.play import Channel, Post, Step
from hpc_train.plan.schedule import COLLECTIVES, Action, Direction, Op, Payload, Schedule

Costs = Callable[[int, Action], int]
"""Time of an action of a stage, in any unit: how long F, B and W are busy, how long a send, a collective or a copy is
on its way. A recv costs nothing of its own.
"""


@dataclass(frozen=True)
class Process:
    """A stage of a pipeline; processes are numbered pipeline by pipeline."""

    pipeline: int
    stage: int

    @staticmethod
    def of(index: int, num_stages: int) -> Process:
        return Process(*divmod(index, num_stages))


class Content(NamedTuple):
    """What a meeting is about. chunk: the global one that made a payload, or whose collective or copy it is."""

    what: str
    chunk: int
    micro_batch: int | None = None

    def __str__(self) -> str:
        if self.micro_batch is None:
            return f"{self.what} of chunk {self.chunk}"
        return f"{self.what} {self.micro_batch} of chunk {self.chunk}"


def no_costs(stage: int, action: Action) -> int:
    """Everything takes no time: enough to find a deadlock."""
    return 0


def pipeline_steps(
    schedules: Sequence[Schedule], costs: Costs = no_costs, *, one_queue_each_way: bool = False
) -> list[list[Step]]:
    """One list of steps for each stage of each pipeline, step k being action k.

    one_queue_each_way: a stage does all its transfers UP one after another, received or sent, and so those DOWN, as
    where each direction is one communicator of NCCL; else only those with the same stage.
    """
    return [
        _Stage(schedule, stage, pipeline, len(schedules), costs, one_queue_each_way).steps()
        for pipeline, schedule in enumerate(schedules)
        for stage in range(schedule.num_stages)
    ]


class _Stage:
    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        pipeline: int,
        num_pipelines: int,
        costs: Costs,
        one_queue_each_way: bool,
    ) -> None:
        self.one_queue_each_way = one_queue_each_way
        self.schedule = schedule
        self.stage = stage
        self.costs = costs
        self.first = pipeline * schedule.num_stages
        self.same_stages = tuple(stage + other * schedule.num_stages for other in range(num_pipelines))
        self.posted: set[Hashable] = set()
        self.sending: defaultdict[int, deque[Content]] = defaultdict(deque)

    def steps(self) -> list[Step]:
        steps = []
        for action in self.schedule.actions[self.stage]:
            steps.append(self._step(action))
            if (post := steps[-1].post) is not None:
                self.posted.add(post.content)
        return steps

    def _step(self, action: Action) -> Step:
        chunk = self.schedule.chunks[self.stage][action.model_chunk]
        cost = 0 if action.op is Op.RECV else self.costs(self.stage, action)
        if action.op is Op.F:
            wanted = [Content(Op.ALL_GATHER, chunk), Content(Payload.ACTIVATION, chunk - 1, action.micro_batch)]
        elif action.op is Op.B:
            wanted = [
                Content(Op.RELOAD, chunk, action.micro_batch),
                Content(Payload.GRADIENT, chunk + 1, action.micro_batch),
            ]
        elif action.op is Op.RELOAD:
            wanted = [Content(Op.OFFLOAD, chunk, action.micro_batch)]
        elif action.op is Op.UPDATE:
            wanted = [Content(Op.REDUCE_SCATTER, chunk)]
        elif action.op is Op.SEND:
            assert action.peer is not None and action.payload is not None
            sending = self.sending[action.peer]
            wanted = [sending.popleft() for _ in range(action.sends_over)]
            sending.append(Content(action.payload, chunk, action.micro_batch))
        else:
            post = self._post(action, chunk, cost)
            return Step(busy=0 if post else cost, post=post)
        # Only what this stage posts can arrive; that it posts all it needs is checked by the list alone.
        waits = tuple(content for content in wanted if content in self.posted)
        post = self._post(action, chunk, cost)
        return Step(waits, 0 if post else cost, post)

    def _post(self, action: Action, chunk: int, cost: int) -> Post | None:
        own = self.first + self.stage
        if action.op in COLLECTIVES:
            return Post(Channel("collectives", self.same_stages), Content(action.op, chunk), cost)
        if action.op in (Op.OFFLOAD, Op.RELOAD):
            return Post(Channel(action.op, (own,)), Content(action.op, chunk, action.micro_batch), cost)
        if action.peer is None:
            return None
        assert action.payload is not None
        peer = self.first + action.peer
        ends = (own, peer) if action.op is Op.SEND else (peer, own)
        queue = Direction.of(*ends) if self.one_queue_each_way else None
        if action.op is Op.RECV:
            chunk += -1 if action.payload is Payload.ACTIVATION else 1
        content = Content(action.payload, chunk, action.micro_batch)
        return Post(Channel("direction", ends), content, cost, queue)

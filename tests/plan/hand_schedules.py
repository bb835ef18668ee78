"""Schedules written by hand, one word an action, and an opinion of their soundness that shares no code with ours.

`F3` forward of micro-batch 3; `B3`, `W3`, `off3`, `rel3` likewise; `sa3>1` sends activation 3 to stage 1, `rg3<1`
receives gradient 3 from it; `AG`, `RS` are collectives. `.1` before the peer names model_chunk 1.
"""

from __future__ import annotations

import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from hpc_train.plan.schedule import Action, Op, Payload, Schedule

_WORD = re.compile(r"(?P<op>F|B|W|off|rel|AG|RS|[sr][ag])(?P<index>\d+)?(?:\.(?P<chunk>\d+))?(?:[<>](?P<peer>\d+))?")
_OPS = {
    "F": Op.F,
    "B": Op.B,
    "W": Op.W,
    "off": Op.OFFLOAD,
    "rel": Op.RELOAD,
    "AG": Op.ALL_GATHER,
    "RS": Op.REDUCE_SCATTER,
    "s": Op.SEND,
    "r": Op.RECV,
}
_PAYLOADS = {"a": Payload.ACTIVATION, "g": Payload.GRADIENT}


def parse(line: str) -> tuple[Action, ...]:
    actions = []
    for word in line.split():
        match = _WORD.fullmatch(word)
        assert match, word
        op, index, chunk, peer = match.group("op", "index", "chunk", "peer")
        actions.append(
            Action(
                _OPS[op if peer is None else op[0]],
                None if index is None else int(index),
                int(chunk or 0),
                None if peer is None else int(peer),
                None if peer is None else _PAYLOADS[op[1]],
            )
        )
    return tuple(actions)


def written(num_micro_batches: int, chunks: tuple[tuple[int, ...], ...], *lines: str) -> Schedule:
    return Schedule(num_micro_batches, chunks, tuple(map(parse, lines)))


INTERLEAVED = written(
    2,
    ((0, 2), (1, 3)),
    "F0 sa0>1 F1 sa1>1 ra0.1<1 F0.1 sa0.1>1 ra1.1<1 F1.1 sa1.1>1 "
    "rg0.1<1 B0.1 sg0.1>1 rg1.1<1 B1.1 sg1.1>1 rg0<1 B0 rg1<1 B1",
    "ra0<0 F0 sa0>0 ra1<0 F1 sa1>0 ra0.1<0 F0.1 B0.1 sg0.1>0 ra1.1<0 F1.1 B1.1 sg1.1>0 rg0<0 B0 sg0>0 rg1<0 B1 sg1>0",
)
ZERO_BUBBLE = written(
    3,
    ((0,), (1,)),
    "F0 sa0>1 F1 sa1>1 rg0<1 B0 F2 sa2>1 rg1<1 B1 W0 rg2<1 B2 W1 W2",
    "ra0<0 F0 ra1<0 B0 sg0>0 F1 ra2<0 B1 sg1>0 F2 B2 sg2>0 W0 W1 W2",
)
# Chunks go down the stages and up again, so the last stage hands over to itself and the first one has the loss.
V_SHAPED = written(
    2,
    ((0, 3), (1, 2)),
    "F0 sa0>1 F1 sa1>1 ra0.1<1 F0.1 B0.1 sg0.1>1 W0.1 ra1.1<1 F1.1 B1.1 sg1.1>1 rg0<1 B0 W0 W1.1 rg1<1 B1 W1",
    "ra0<0 F0 F0.1 sa0.1>0 ra1<0 F1 F1.1 sa1.1>0 rg0.1<0 B0.1 B0 sg0>0 W0.1 W0 rg1.1<0 B1.1 B1 sg1>0 W1.1 W1",
)
EVERYTHING_ELSE = written(
    2,
    ((0,), (1,)),
    "AG F0 sa0>1 off0 F1 rg0<1 sa1>1 rel0 B0 rg1<1 B1 RS",
    "ra0<0 AG ra1<0 F0 B0 sg0>0 F1 off1 rel1 B1 sg1>0 RS",
)
BY_HAND = {
    "interleaved": INTERLEAVED,
    "zero-bubble": ZERO_BUBBLE,
    "v-shaped": V_SHAPED,
    "collectives and offload": EVERYTHING_ELSE,
}


def is_sound(schedule: Schedule) -> bool:
    """For lists that hold the right actions in any order: do messages match, and has the graph of waits no cycle?"""
    graph: dict[object, set[object]] = defaultdict(set)
    sends, receives = defaultdict(list), defaultdict(list)
    for stage, actions in enumerate(schedule.actions):
        nodes = {action: (stage, index) for index, action in enumerate(actions)}
        for action, (_, index) in nodes.items():
            here = (stage, index)
            if index:
                graph[here].add((stage, index - 1))
            graph[here] |= {nodes[other] for other in _follows(schedule, stage, action) if other in nodes}
            if action.peer is None:
                continue
            chunk = schedule.chunks[stage][action.model_chunk]
            if action.op is Op.SEND:
                message = (action.payload, action.micro_batch, chunk)
                sends[stage, action.peer].append(message)
            else:
                message = (action.payload, action.micro_batch, chunk + (-1 if action.payload == "activation" else 1))
                receives[action.peer, stage].append(message)
                consumer = Action(
                    Op.F if action.payload == "activation" else Op.B, action.micro_batch, action.model_chunk
                )
                graph[nodes[consumer]].add(message)
            graph[message].add(here)
    if sends != receives:
        return False
    for messages in sends.values():
        for first, then in pairwise(messages):
            graph[then].add(first)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


def _follows(schedule: Schedule, stage: int, action: Action) -> list[Action]:
    """Other actions of the stage that this one needs, messages aside."""
    index, own = action.micro_batch, action.model_chunk
    chunk = schedule.chunks[stage][own]
    if action.op is Op.F:
        local = (
            [Action(Op.F, index, schedule.chunks[stage].index(chunk - 1))]
            if chunk - 1 in schedule.chunks[stage]
            else []
        )
        return [*local, Action(Op.ALL_GATHER, None, own)]
    if action.op is Op.B:
        local = (
            [Action(Op.B, index, schedule.chunks[stage].index(chunk + 1))]
            if chunk + 1 in schedule.chunks[stage]
            else []
        )
        return [*local, Action(Op.F, index, own), Action(Op.RELOAD, index, own)]
    if action.op is Op.SEND:
        return [Action(Op.F if action.payload == "activation" else Op.B, index, own)]
    if action.op is Op.REDUCE_SCATTER:
        return [Action(op, every, own) for op in (Op.B, Op.W) for every in range(schedule.num_micro_batches)]
    if action.op is Op.ALL_GATHER:
        return []
    before = {Op.W: Op.B, Op.OFFLOAD: Op.F, Op.RELOAD: Op.OFFLOAD}
    return [Action(before[action.op], index, own)] if action.op in before else []

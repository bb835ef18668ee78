"""Buffers that go from rank to rank along chains, many at a time, in one order that all ranks share.

A leg is one rank's part in one such journey. For each of its legs in turn a rank

1. gets the buffer: it makes it where the journey begins, else it awaits what the rank before sends
2. begins to send it on, unless the journey ends here
3. takes from it what it needs itself

On gloo receives are posted a few legs ahead and sends are awaited a few legs later, so a rank receives, sends and
makes buffers at the same time. A wait is always for something earlier in the common order, so no circle can form. On
nccl, which runs a rank's transfers one after the other, nothing is posted out of turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpc_train.comm.collectives import Group

LEGS_AHEAD = 3
"""Buffers being received, and as many being sent, beside the one at hand (assumed: enough to hide a late rank)."""


@dataclass(frozen=True)
class Leg:
    """One rank's part. source, target: global ranks before and behind it; None: it begins or ends here."""

    num_bytes: int
    source: int | None
    target: int | None


def relay(
    legs: Sequence[Leg],
    make: Callable[[int], torch.Tensor],
    take: Callable[[int, torch.Tensor], None],
    group: Group,
    device: torch.device,
) -> None:
    """Take part in all of this rank's legs. Every rank of a journey must call it, with legs in the common order.

    Args:
        legs: This rank's own.
        make: Gives the buffer of a leg that begins here, by the leg's number: (num_bytes,), uint8, on `device`.
            Called once for each such leg, in order.
        take: Gets a leg's number and its buffer, in order; it may not change or keep the buffer.
        group: All ranks of all journeys.
        device: Of the buffers.
    """
    ahead = 0 if group.backend == "nccl" else LEGS_AHEAD
    receiving: dict[int, tuple[torch.Tensor, list[Any]]] = {}
    sending: deque[tuple[torch.Tensor, list[Any]]] = deque()
    posted = 0
    for number, leg in enumerate(legs):
        while posted < len(legs) and posted <= number + ahead:
            source = legs[posted].source
            if source is not None:
                room = torch.empty(legs[posted].num_bytes, dtype=torch.uint8, device=device)
                receiving[posted] = (room, _begin(dist.irecv, room, source, group))
            posted += 1
        if leg.source is None:
            buffer = make(number)
        else:
            buffer, works = receiving.pop(number)
            _await(works)
        if leg.target is not None:
            sending.append((buffer, _begin(dist.isend, buffer, leg.target, group)))
        take(number, buffer)
        while len(sending) > ahead:
            _await(sending.popleft()[1])
    for _, works in sending:
        _await(works)


def _begin(operation: Any, buffer: torch.Tensor, peer: int, group: Group) -> list[Any]:
    if group.backend == "nccl":
        # In a batch it runs on the group's own communicator; alone each pair of ranks would get one.
        return list(dist.batch_isend_irecv([dist.P2POp(operation, buffer, peer, group.handle)]))
    return [operation(buffer, peer, group=group.handle)]


def _await(works: list[Any]) -> None:
    for work in works:
        work.wait()

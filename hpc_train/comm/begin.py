"""Collectives on flat buffers that are begun and go on beside this rank's work until they are awaited.

On nccl they are its own, on the group's stream. On gloo they are made of direct sends: two ranks of a group have one
connection, which carries messages in the order in which they were posted. So what is begun first is there first,
however much is begun behind it. gloo's own reduce-scatter moves as many bytes as its all-reduce, twice what is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpc_train.comm.collectives import Group
from hpc_train.record import NO_SEGMENT, Kind, Segment


@dataclass
class Pending:
    """A collective under way.

    works: of its transfers. finish: what is to be done when they are over; None where they are the whole of it.
    segment: what its time is recorded as, up to the end of its transfers.
    """

    works: Sequence[Any] = ()
    finish: Callable[[], None] | None = None
    segment: Segment = NO_SEGMENT

    def wait(self) -> None:
        """Return when the result is there; on nccl, when it is for all that is launched from here on."""
        self.segment.begin_wait()
        for work in self.works:
            work.wait()
        self.segment.end()
        if self.finish is not None:
            self.finish()
        self.works, self.finish, self.segment = (), None, NO_SEGMENT


def begin_all_gather(flat: torch.Tensor, group: Group) -> Pending:
    """Begin to fill `flat` with every rank's part of it. Collective over the group.

    flat: (group_size * shard,), contiguous. This rank's own part is valid on entry; all are once it has been awaited.
    """
    if group.group_size == 1:
        return Pending()
    segment = group.timed("all_gather", flat.nbytes)
    parts = flat.view(group.group_size, -1)
    mine = parts[group.group_rank]
    if group.backend == "nccl":
        work = dist.all_gather_into_tensor(flat, mine, group=group.handle, async_op=True)
        return Pending([work], segment=segment)
    return Pending(exchange([(rank, mine, parts[peer]) for peer, rank in group.peers], group), segment=segment)


def room_for_sums(flat: torch.Tensor, group: Group, wire: torch.dtype | None = None) -> torch.Tensor | None:
    """What `begin_reduce_scatter` receives into, for its caller to keep between calls; None where it needs nothing.

    Fresh pages cost more than a transfer on a CPU.
    """
    if group.group_size == 1 or group.backend == "nccl" or _is_narrower(wire, flat):
        return None
    return flat.new_empty(group.group_size - 1, flat.numel() // group.group_size)


def begin_reduce_scatter(
    flat: torch.Tensor, group: Group, room: torch.Tensor | None, wire: torch.dtype | None = None
) -> Pending:
    """Begin to sum `flat` over the group into this rank's own part of it. Collective over the group.

    The order of additions depends on the group's order alone, so a repeated run adds alike.

    Args:
        flat: (group_size * shard,), contiguous; its own part is the sum once it has been awaited, the rest is then
            undefined.
        room: from `room_for_sums`, used by no other one under way.
        wire: type in which summands travel, at most half as wide as flat's; None for flat's own. Sums are made in
            flat's type by the rank that keeps them, and its own summand is not rounded.
    """
    if group.group_size == 1:
        return Pending()
    parts = flat.view(group.group_size, -1)
    mine = parts[group.group_rank]
    if wire is not None and _is_narrower(wire, flat):
        return _begin_narrow(flat, group, wire)
    segment = group.timed("reduce_scatter", flat.nbytes)
    if group.backend == "nccl":
        work = dist.reduce_scatter_tensor(mine, parts, group=group.handle, async_op=True)
        return Pending([work], segment=segment)
    assert room is not None, "gloo receives summands into room_for_sums"
    transfers = [(rank, parts[peer], room[slot]) for slot, (peer, rank) in enumerate(group.peers)]
    return Pending(exchange(transfers, group), lambda: _add(mine, list(room)), segment)


def begin_all_reduce(tensor: torch.Tensor, group: Group) -> Pending:
    """Begin to replace a contiguous tensor by its sum over the group, the same bits on every rank. Collective."""
    if group.group_size == 1:
        return Pending()
    segment = group.timed("all_reduce", tensor.nbytes)
    if group.group_size == 2 and group.backend != "nccl":
        # One exchange of all of it moves the bytes of a ring in half its steps; a sum of two has no order.
        received = torch.empty_like(tensor)
        ((_, peer),) = group.peers
        return Pending(exchange([(peer, tensor, received)], group), lambda: _add(tensor, [received]), segment)
    return Pending([dist.all_reduce(tensor, group=group.handle, async_op=True)], segment=segment)


def _begin_narrow(flat: torch.Tensor, group: Group, wire: torch.dtype) -> Pending:
    """Direct sends on every backend. What goes to a rank, and what comes from it, lie in its part of `flat`, which
    nobody needs any more.
    """
    segment = group.timed("reduce_scatter", flat.numel() * wire.itemsize)
    parts = flat.view(group.group_size, -1)
    words = flat.view(wire).view(group.group_size, -1, parts.shape[1])
    transfers = []
    for peer, rank in group.peers:
        words[peer, 0].copy_(parts[peer].to(wire))
        transfers.append((rank, words[peer, 0], words[peer, 1]))
    received = [theirs for _, _, theirs in transfers]
    return Pending(exchange(transfers, group), lambda: _add(parts[group.group_rank], received), segment)


def _is_narrower(wire: torch.dtype | None, flat: torch.Tensor) -> bool:
    return wire is not None and 2 * wire.itemsize <= flat.element_size()


def exchange(transfers: Sequence[tuple[int, torch.Tensor, torch.Tensor]], group: Group) -> list[Any]:
    """Begin to send to and to receive from ranks: (global rank, what it gets, where its own goes)."""
    if group.backend == "nccl":
        operations = []
        for rank, ours, theirs in transfers:
            operations.append(dist.P2POp(dist.irecv, theirs, rank, group.handle))
            operations.append(dist.P2POp(dist.isend, ours, rank, group.handle))
        return list(dist.batch_isend_irecv(operations))
    works = []
    for rank, ours, theirs in transfers:
        works.append(dist.irecv(theirs, src=rank, group=group.handle))
        works.append(dist.isend(ours, dst=rank, group=group.handle))
    return works


def begin_shift(
    sent: Sequence[torch.Tensor],
    received: Sequence[torch.Tensor],
    group: Group,
    *,
    to_rank: int,
    from_rank: int,
) -> list[Pending]:
    """Begin to send tensors to one group rank and to receive others from one, as each member of a ring does.

    What is sent is received in its order. Tensors are contiguous and live unchanged until all has been awaited; empty
    ones do not travel, so both sides must know which ones are.
    """
    sent = [tensor for tensor in sent if tensor.numel()]
    received = [tensor for tensor in received if tensor.numel()]
    ahead, behind = group.ranks[to_rank], group.ranks[from_rank]
    under_way = []
    if received:
        num_bytes = sum(tensor.nbytes for tensor in received)
        under_way.append(Pending(segment=group.timed("recv", num_bytes, Kind.RECEIVE, behind)))
    if sent:
        num_bytes = sum(tensor.nbytes for tensor in sent)
        under_way.append(Pending(segment=group.timed("send", num_bytes, Kind.SEND, ahead)))
    if not under_way:
        return []
    if group.backend == "nccl":
        operations = [dist.P2POp(dist.irecv, tensor, behind, group.handle) for tensor in received]
        operations += [dist.P2POp(dist.isend, tensor, ahead, group.handle) for tensor in sent]
        works = list(dist.batch_isend_irecv(operations))
        for pending in under_way:
            pending.works = works
        return under_way
    if received:
        under_way[0].works = [dist.irecv(tensor, src=behind, group=group.handle) for tensor in received]
    if sent:
        under_way[-1].works = [dist.isend(tensor, dst=ahead, group=group.handle) for tensor in sent]
    return under_way


def _add(mine: torch.Tensor, summands: Sequence[torch.Tensor]) -> None:
    for summand in summands:
        mine.add_(summand)

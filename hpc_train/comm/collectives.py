"""Collectives over one group of ranks; `begin` has those that run beside other work, `tokens` those on sequences.

On nccl these are its own collectives. On gloo an all-gather is made of direct sends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hpc_train.record import NOT_RECORDED, Kind, Recorder, Segment


@dataclass(frozen=True)
class Group:
    """A group of ranks that communicate, this rank among them.

    ranks: global ranks in group order. handle: torch's process group, or None when this rank is alone. name, recorder:
    what its communication is timed as, and by whom.
    """

    ranks: tuple[int, ...]
    group_rank: int
    handle: dist.ProcessGroup | None
    backend: str
    name: str = "world"
    recorder: Recorder = field(default=NOT_RECORDED, repr=False, compare=False)
    _scratch: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def group_size(self) -> int:
        return len(self.ranks)

    @property
    def peers(self) -> list[tuple[int, int]]:
        """(group rank, global rank) of the others, starting behind this rank, so that no one is everyone's first."""
        order = [(self.group_rank + distance) % self.group_size for distance in range(1, self.group_size)]
        return [(peer, self.ranks[peer]) for peer in order]

    def timed(self, operation: str, num_bytes: int, kind: Kind = Kind.COLLECTIVE, peer: int = -1) -> Segment:
        """Begin the segment of a transfer of this group's. peer: global rank of a send or receive."""
        return self.recorder.communication(kind, operation, self.name, self.ranks, num_bytes, peer)

    def scratch(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A buffer that is kept between calls: fresh pages cost more than the transfer on a CPU."""
        key = f"{like.dtype}{like.device}"
        count = 1
        for extent in shape:
            count *= extent
        kept = self._scratch.get(key)
        if kept is None or kept.numel() < count:
            kept = self._scratch[key] = torch.empty(count, dtype=like.dtype, device=like.device)
        return kept[:count].view(shape)


def world_group(world_size: int, rank: int, backend: str, recorder: Recorder = NOT_RECORDED) -> Group:
    """The group of all ranks on the default process group."""
    handle = dist.group.WORLD if world_size > 1 else None
    return Group(tuple(range(world_size)), rank, handle, backend, recorder=recorder)


def all_gather_(flat: torch.Tensor, group: Group) -> None:
    """Fill `flat` with every rank's part of it. Collective over the group.

    flat: (group_size * shard,), contiguous; on entry this rank's own part is valid, on return all are.
    """
    if group.group_size == 1:
        return
    with group.timed("all_gather", flat.nbytes):
        parts = flat.view(group.group_size, -1)
        mine = parts[group.group_rank]
        if group.backend == "nccl":
            dist.all_gather_into_tensor(flat, mine, group=group.handle)
            return
        works = []
        for peer, rank in group.peers:
            works.append(dist.irecv(parts[peer], src=rank, group=group.handle))
            works.append(dist.isend(mine, dst=rank, group=group.handle))
        for work in works:
            work.wait()  # type: ignore[union-attr]


def all_reduce_(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Replace a contiguous tensor by its sum over the group, the same bits on every rank, and return it. Collective."""
    if group.group_size == 1:
        return tensor
    with group.timed("all_reduce", tensor.nbytes):
        return _all_reduced(tensor, group)


def _all_reduced(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    if group.group_size == 2 and group.backend != "nccl":
        # One exchange of all of it moves the bytes of a ring in half its steps; a sum of two has no order.
        received = group.scratch(tensor, tuple(tensor.shape))
        (peer,) = [rank for rank in group.ranks if rank != group.ranks[group.group_rank]]
        works = [dist.irecv(received, src=peer, group=group.handle), dist.isend(tensor, dst=peer, group=group.handle)]
        for work in works:
            work.wait()  # type: ignore[union-attr]
        return tensor.add_(received)
    dist.all_reduce(tensor, group=group.handle)
    return tensor


class Transfer:
    """A send or a receive under way."""

    def __init__(self, work: dist.Work | None, segment: Segment) -> None:
        assert work is not None, "only ranks that are no members of a group get none"
        self._work, self._segment = work, segment

    def wait(self) -> None:
        """Return when it is over. Called once."""
        self._segment.begin_wait()
        self._work.wait()
        self._segment.end()


def send_to(tensor: torch.Tensor, group_rank: int, group: Group) -> Transfer:
    """Begin to send a contiguous tensor; it must live unchanged until the work that is returned has been awaited."""
    peer = group.ranks[group_rank]
    segment = group.timed("send", tensor.nbytes, Kind.SEND, peer)
    return Transfer(dist.isend(tensor, dst=peer, group=group.handle), segment)


def receive_from(tensor: torch.Tensor, group_rank: int, group: Group) -> Transfer:
    """Begin to fill a contiguous tensor with what a rank of the group sends; valid when the work has been awaited."""
    peer = group.ranks[group_rank]
    segment = group.timed("recv", tensor.nbytes, Kind.RECEIVE, peer)
    return Transfer(dist.irecv(tensor, src=peer, group=group.handle), segment)


def all_reduce_sum(values: list[float], group: Group, device: torch.device) -> list[float]:
    """Sums of a few numbers over the group, in double precision, the same on every rank."""
    if group.group_size == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    with group.timed("all_reduce", tensor.nbytes):
        dist.all_reduce(tensor, group=group.handle)
        return [float(value) for value in tensor]

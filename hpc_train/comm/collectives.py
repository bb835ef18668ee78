"""Collectives over one group of ranks; `begin` has those that run beside other work.

On nccl these are its own collectives. On gloo reduce-scatter and all-gather are made of direct sends, since
gloo's reduce-scatter moves as many bytes as its all-reduce, twice what is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hpc_train.record import NOT_RECORDED, Kind, Recorder, Segment

# Largest piece that one rank sends to another at once; bounds the scratch memory of a reduce-scatter to
# (group_size - 1) times this (assumed; 1 to 64 MiB made no difference beyond noise at 2 gloo ranks).
_PIECE_BYTES = 16 * 2**20


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


def all_gather_tokens(x_BTh: torch.Tensor, group: Group) -> torch.Tensor:
    """The whole sequences, from each rank's share of their tokens. Collective.

    x_BTh: (B, T/n, h) on each of the n ranks, in group order; the result is (B, T, h).
    """
    num_shares = group.group_size
    B, share, h = x_BTh.shape
    gathered_nBTh = x_BTh.new_empty(num_shares, B, share, h)
    gathered_nBTh[group.group_rank].copy_(x_BTh)
    all_gather_(gathered_nBTh.view(-1), group)
    return gathered_nBTh.transpose(0, 1).reshape(B, num_shares * share, h)


def reduce_scatter_tokens(x_BTh: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's share of the tokens of the sum over the group. Collective.

    x_BTh: (B, T, h), a partial sum of all tokens on each of the n ranks; the result is (B, T/n, h).
    """
    num_shares = group.group_size
    B, T, h = x_BTh.shape
    parts_nBTh = x_BTh.view(B, num_shares, T // num_shares, h).transpose(0, 1).contiguous()  # a view where B is 1
    share_BTh = parts_nBTh[group.group_rank].clone()
    _reduce_scatter_into(share_BTh.view(-1), parts_nBTh.view(num_shares, -1), group)
    return share_BTh


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


def _reduce_scatter_into(mine: torch.Tensor, parts: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum this rank's part over the group into `mine`, which holds its own summand on entry."""
    if group.group_size == 1:
        return mine
    with group.timed("reduce_scatter", parts.nbytes):
        if group.backend == "nccl":
            dist.reduce_scatter_tensor(mine, parts, group=group.handle)
            return mine
        piece = max(1, _PIECE_BYTES // mine.element_size())
        for start in range(0, mine.numel(), piece):
            stop = min(start + piece, mine.numel())
            _exchange_and_add(parts, mine[start:stop], start, stop, group)
    return mine


def _exchange_and_add(parts: torch.Tensor, mine: torch.Tensor, start: int, stop: int, group: Group) -> None:
    peers = group.peers
    received = group.scratch(mine, (len(peers), stop - start))
    receives, sends = [], []
    for slot, (peer, rank) in enumerate(peers):
        receives.append(dist.irecv(received[slot], src=rank, group=group.handle))
        sends.append(dist.isend(parts[peer, start:stop], dst=rank, group=group.handle))
    for slot, work in enumerate(receives):
        work.wait()  # type: ignore[union-attr]
        mine.add_(received[slot])
    for work in sends:
        work.wait()  # type: ignore[union-attr]

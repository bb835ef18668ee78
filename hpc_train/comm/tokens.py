"""Sequences of which each rank of a group has a share of the tokens: gathered, and partial sums of them scattered.

A share may go in tiles, which are under way one behind the other; a tile is made of the same tokens of every share. On
nccl these are its own collectives, on the group's stream. On gloo they are direct sends of half the bytes of gloo's own
reduce-scatter, in the order in which they were posted; what arrives goes straight to its place.

Shapes: B sequences of T tokens on n ranks, S = T / n tokens a share, s a tile, h channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hpc_train.comm.begin import Pending, exchange
from hpc_train.comm.collectives import Group


def begin_gather_tokens(whole_BTh: torch.Tensor, num_tiles: int, group: Group) -> list[Pending]:
    """Begin to fill whole sequences, tile by tile. Collective over the group.

    whole_BTh: contiguous; this rank's share is valid on entry, and a tile of the others' when it has been awaited.
    """
    B, _, h = whole_BTh.shape
    tiles_BntSh = whole_BTh.view(B, group.group_size, num_tiles, -1, h)
    return [_begin_gather(tiles_BntSh[:, :, tile], group) for tile in range(num_tiles)]


def all_gather_tokens(share_BSh: torch.Tensor, group: Group) -> torch.Tensor:
    """Whole sequences, from each rank's share: (B, T, h). Collective over the group."""
    whole_BTh = room_for_whole(share_BSh, group)
    for tile in begin_gather_tokens(whole_BTh, 1, group):
        tile.wait()
    return whole_BTh


def room_for_whole(share_BSh: torch.Tensor, group: Group) -> torch.Tensor:
    """Whole sequences in which this rank's share is, and others' are not yet."""
    B, S, h = share_BSh.shape
    whole_BTh = share_BSh.new_empty(B, group.group_size * S, h)
    whole_BTh.view(B, group.group_size, S, h)[:, group.group_rank].copy_(share_BSh)
    return whole_BTh


def reduce_scatter_tokens(partial_BTh: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's share of the sum over the group of partial sums of whole sequences: (B, S, h). Collective."""
    B, _, h = partial_BTh.shape
    parts_nBSh = partial_BTh.view(B, group.group_size, -1, h).transpose(0, 1).contiguous()  # a view where B is 1
    share_BSh = parts_nBSh[group.group_rank].clone()
    sums = TokenSums(share_BSh, 1, group)
    sums.begin(0, parts_nBSh)
    sums.wait()
    return share_BSh


class TokenSums:
    """Partial sums of whole sequences, on their way to the ranks that have the tokens.

    The order of additions depends on the group's order alone.
    """

    def __init__(self, share_BSh: torch.Tensor, num_tiles: int, group: Group) -> None:
        """Expect the tiles of others. Collective over the group; until `wait` it does nothing else.

        share_BSh: contiguous; has this rank's own summand when `wait` is called, and then the sum.
        """
        B, S, h = share_BSh.shape
        self._group = group
        self._tiles_BtSh = share_BSh.view(B, num_tiles, -1, h)
        self._pending: list[Pending] = []
        self._partials: list[torch.Tensor] = []
        self._receives: list[list[Any]] = []
        if group.group_size == 1 or group.backend == "nccl":
            return
        # All receives are posted ahead: a send begins when it knows that it is expected.
        self._room_tnBsh = group.scratch(share_BSh, (num_tiles, group.group_size - 1, B, S // num_tiles, h))
        for room_nBsh in self._room_tnBsh:
            receives = zip(group.peers, room_nBsh, strict=True)
            self._receives.append([dist.irecv(room, src=rank, group=group.handle) for (_, rank), room in receives])

    def begin(self, tile: int, partial_nBsh: torch.Tensor) -> None:
        """Send a tile; tiles go in order.

        partial_nBsh: contiguous, what each rank gets, to be left alone until `wait`. This rank's own part is not read,
            and on nccl is overwritten.
        """
        group = self._group
        if group.group_size == 1:
            return
        self._partials.append(partial_nBsh)
        share_Bsh = self._tiles_BtSh[:, tile]
        segment = group.timed("reduce_scatter", partial_nBsh.nbytes)
        if group.backend == "nccl":
            partial_nBsh[group.group_rank].zero_()
            received_Bsh = torch.empty_like(partial_nBsh[0])
            flat = partial_nBsh.flatten(0, 1)
            work = dist.reduce_scatter_tensor(received_Bsh, flat, group=group.handle, async_op=True)
            self._pending.append(Pending([work], lambda: _add(share_Bsh, received_Bsh[None]), segment))
            return
        sends = [dist.isend(partial_nBsh[peer], dst=rank, group=group.handle) for peer, rank in group.peers]
        room_nBsh = self._room_tnBsh[tile]
        works = [*self._receives[tile], *sends]
        self._pending.append(Pending(works, lambda: _add(share_Bsh, room_nBsh), segment))

    def wait(self) -> None:
        """Return when the share has the sum of all tiles that were begun."""
        for pending in self._pending:
            pending.wait()


def _begin_gather(parts_Bnsh: torch.Tensor, group: Group) -> Pending:
    """Begin to fill the parts of the others from this rank's own, all of whole sequences."""
    if group.group_size == 1:
        return Pending()
    segment = group.timed("all_gather", parts_Bnsh.numel() * parts_Bnsh.element_size())
    if group.backend != "nccl":
        own_Bsh = parts_Bnsh[:, group.group_rank]
        transfers = [
            (rank, own_sh, part_sh)
            for peer, rank in group.peers
            for own_sh, part_sh in zip(own_Bsh, parts_Bnsh[:, peer], strict=True)
        ]
        return Pending(exchange(transfers, group), segment=segment)
    parts_nBsh = parts_Bnsh.transpose(0, 1)
    if parts_nBsh.is_contiguous():
        return Pending([_gather_in_place(parts_nBsh, group)], segment=segment)
    gathered_nBsh = torch.empty(parts_nBsh.shape, dtype=parts_nBsh.dtype, device=parts_nBsh.device)
    gathered_nBsh[group.group_rank].copy_(parts_nBsh[group.group_rank])
    work = _gather_in_place(gathered_nBsh, group)
    return Pending([work], lambda: _put(parts_nBsh, gathered_nBsh), segment)


def _gather_in_place(parts: torch.Tensor, group: Group) -> Any:
    return dist.all_gather_into_tensor(parts.flatten(0, 1), parts[group.group_rank], group=group.handle, async_op=True)


def _put(parts: torch.Tensor, gathered: torch.Tensor) -> None:
    parts.copy_(gathered)


def _add(share: torch.Tensor, summands: torch.Tensor) -> None:
    for summand in summands:
        share.add_(summand)

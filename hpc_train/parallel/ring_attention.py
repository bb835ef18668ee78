"""Attention of sequences that a ring of ranks has together: queries stay, keys and values go round.

Of each sequence the member at a place has the two parts that `plan.batch.zigzag` gives it, all sequences one behind the
other as rows. A step of a ring of N members goes like this:

- forward: keys and values go on to the next member while this one computes with them; what its queries get is merged
- backward: keys and values go round once more. The gradients of them that a member has made go on a step behind, while
  it computes with the next ones, and are added to by each member; the last hop takes them home

All travels from rank to rank on one group, in which rings of any members and sizes may be: nothing is made for a ring.
A member takes part in every step also with no rows of its own. Members meet their rings in one order, so none waits in
a circle; that is the plan's to see to.

Source: Liu et al., "Ring attention with blockwise transformers for near-infinite context", ICLR'24; ByteScale (arXiv
2502.21231), section 5. Shapes: T rows of this member, S of another, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch

from hpc_train.comm.begin import Pending, begin_shift
from hpc_train.comm.collectives import Group
from hpc_train.models.attention import AttentionCore
from hpc_train.parallel.attention_blocks import BlockKernel, Meeting, Results, Sums, TileKernel, exact_type
from hpc_train.parallel.attention_flash import FlashKernel
from hpc_train.plan.ring_blocks import num_rows, ring_blocks


@final
@dataclass(frozen=True)
class Ring:
    """Whose sequences these are, seen by one member.

    lengths: of all sequences, the same on all members. members: group ranks in the order in which keys and values go.
    place: this rank's among them.
    """

    lengths: tuple[int, ...]
    members: tuple[int, ...]
    place: int
    group: Group
    _meetings: dict[tuple[int, int | None], Meeting] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.members)

    def source(self, step: int) -> int:
        """The place whose keys and values are here in a step."""
        return (self.place - step) % len(self)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Of the member at each place."""
        return tuple(num_rows(self.lengths, len(self), place) for place in range(len(self)))

    def meeting(self, key_place: int, window: int | None) -> Meeting:
        """What this member's queries see of a member's keys; found once for all layers with this window."""
        key = (key_place, window)
        if key not in self._meetings:
            self._meetings[key] = Meeting(ring_blocks(self.lengths, len(self), self.place, key_place, window))
        return self._meetings[key]

    def begin_shift(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> list[Pending]:
        """Begin to pass tensors on to the next member and to receive those of the one before."""
        ahead, behind = self.members[(self.place + 1) % len(self)], self.members[self.place - 1]
        return begin_shift(sent, received, self.group, to_rank=ahead, from_rank=behind)


@final
@dataclass(frozen=True)
class RingCore(AttentionCore):
    """Attention of a micro-batch of one row: this member's part of a ring's sequences, and perhaps padding behind it.

    A ring of one rank has whole sequences. Padding gets zeros and is seen by nobody.
    """

    ring: Ring

    def attend(
        self, q_BHTD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Collective over the ring."""
        assert len(q_BHTD) == 1, "pieces are packed into one row"
        q_THD, k_TKD, v_TKD = (x_BHTD[0].transpose(0, 1) for x_BHTD in (q_BHTD, k_BKTD, v_BKTD))
        return ring_attention(q_THD, k_TKD, v_TKD, self.ring, window).transpose(0, 1)[None]


def ring_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, ring: Ring, window: int | None = None
) -> torch.Tensor:
    """What this member's queries get of all members' values that they see: (T, H, D). Collective over the ring.

    window: how many tokens a query sees, itself the last of them; None for all before it in its sequence.
    """
    return _RingAttention.apply(q_THD, k_TKD, v_TKD, ring, window)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, ring: Ring, window: int | None
    ) -> torch.Tensor:
        kernel, sums = _kernel(q_THD, window), Sums.nothing(q_THD)
        kv_2SKD = _joined(k_TKD, v_TKD, ring)
        for step in range(len(ring)):
            following, under_way = kv_2SKD, []
            if step < len(ring) - 1:
                following = _room(kv_2SKD, ring, step + 1)
                under_way = ring.begin_shift([kv_2SKD], [following])
            kernel.forward_(sums, q_THD, kv_2SKD, ring.meeting(ring.source(step), window), window)
            _await(under_way)
            kv_2SKD = following
        result_THD = sums.mean_THD.to(q_THD.dtype)
        ctx.ring, ctx.window = ring, window
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, result_THD, sums.log_TH)
        return result_THD

    @staticmethod
    def backward(ctx: Any, gradient_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, result_THD, log_TH = ctx.saved_tensors
        ring, window, exact = ctx.ring, ctx.window, exact_type(q_THD.dtype)
        kernel = _kernel(q_THD, window)
        dot_TH = (result_THD.to(exact) * gradient_THD).sum(dim=2)
        results = Results(q_THD, result_THD, gradient_THD, log_TH, dot_TH)
        of_q_THD = torch.zeros_like(q_THD, dtype=exact, memory_format=torch.contiguous_format)
        kv_2SKD = _joined(k_TKD, v_TKD, ring)
        made: list[torch.Tensor] = []  # gradients of the last step's keys and values, of all members so far
        for step in range(len(ring)):
            kept: list[torch.Tensor] = [] if step == len(ring) - 1 else [kv_2SKD]
            following = [_room(kv_2SKD, ring, step + 1)] if kept else []
            so_far = [_room(kv_2SKD, ring, step, exact)] if made else []
            under_way = ring.begin_shift([*kept, *made], [*following, *so_far])
            of_kv_2SKD = torch.zeros_like(kv_2SKD, dtype=exact)
            meeting = ring.meeting(ring.source(step), window)
            kernel.backward_(of_q_THD, of_kv_2SKD, results, kv_2SKD, meeting, window)
            _await(under_way)
            for summand in so_far:
                of_kv_2SKD += summand
            made = [of_kv_2SKD]
            kv_2SKD = following[0] if following else kv_2SKD
        if len(ring) > 1:
            home = [_room(made[0], ring, 0)]
            _await(ring.begin_shift(made, home))
            made = home
        of_k_TKD, of_v_TKD = (_padded(of_rows, like) for of_rows, like in zip(made[0], (k_TKD, v_TKD), strict=True))
        return of_q_THD.to(q_THD.dtype), of_k_TKD, of_v_TKD, None, None


def _kernel(q_THD: torch.Tensor, window: int | None) -> BlockKernel:
    """Flash attention where it can, tiles elsewhere."""
    return FlashKernel() if FlashKernel.takes(q_THD, window) else TileKernel()


def _joined(k_TKD: torch.Tensor, v_TKD: torch.Tensor, ring: Ring) -> torch.Tensor:
    """This member's keys and values as one tensor, without padding."""
    rows = ring.rows[ring.place]
    return torch.stack([k_TKD[:rows], v_TKD[:rows]])


def _room(like_2SKD: torch.Tensor, ring: Ring, step: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """For keys and values, or their gradients, of the member whose turn it is in a step."""
    return like_2SKD.new_empty(2, ring.rows[ring.source(step)], *like_2SKD.shape[2:], dtype=dtype)


def _padded(rows_SKD: torch.Tensor, like_TKD: torch.Tensor) -> torch.Tensor:
    """In the type of `like`, with zeros behind where that has padding."""
    padding = len(like_TKD) - len(rows_SKD)
    return torch.nn.functional.pad(rows_SKD, (0, 0, 0, 0, 0, padding)).to(like_TKD.dtype)


def _await(under_way: Sequence[Pending]) -> None:
    for pending in under_way:
        pending.wait()

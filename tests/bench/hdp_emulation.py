"""Steps whose layers take modelled times and compute little, for more ranks than there are cores.

Real are documents, plans, rings with their keys and values, the sum of gradients, what is kept on the host and its
copies. Attention and the rest of a layer sleep as long as costs say, beside what is under way. A copy between device
and host takes its modelled time too, beside the work, each way one after another as on a GPU's streams; whoever needs
what is not back yet waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpc_train.parallel import ring_attention
from hpc_train.parallel.attention_blocks import BlockKernel, Meeting, Results, Sums
from hpc_train.parallel.offload import HostRoom
from hpc_train.plan.batch import MicroBatch, SequenceSlice
from hpc_train.plan.batch_cost import MILLI, RESIDENT_LAYERS, BatchCosts
from hpc_train.plan.batch_pieces import PieceBatch
from hpc_train.plan.ring_blocks import Block
from hpc_train.train.step import Trainer

_PROBE_TOKENS = 1024


@dataclass
class SlowRoom:
    """A HostRoom whose copies take modelled time.

    s_per_byte: of a copy. num_bytes: copied out so far. waited_s: by the work, for copies.
    """

    room: HostRoom
    s_per_byte: float = 0.0
    num_bytes: int = 0
    waited_s: float = 0.0
    _out_ends: float = 0.0
    _back_ends: float = 0.0

    def copy_out(self, source_N: torch.Tensor) -> torch.Tensor:
        self.num_bytes += len(source_N)
        self._out_ends = max(time.perf_counter(), self._out_ends) + len(source_N) * self.s_per_byte
        return self.room.copy_out(source_N)

    def copy_back(self, buffer_M: torch.Tensor, target_N: torch.Tensor) -> float:
        """Begins when all that goes out is out, as on streams."""
        self.room.copy_back(buffer_M, target_N)
        begin = max(time.perf_counter(), self._out_ends, self._back_ends)
        self._back_ends = begin + len(target_N) * self.s_per_byte
        return self._back_ends

    def wait(self, begun: float) -> None:
        left_s = begun - time.perf_counter()
        if left_s > 0:
            self.waited_s += left_s
            time.sleep(left_s)

    def give_back(self, buffer_M: torch.Tensor, last_read: Any) -> None:
        self.room.give_back(buffer_M, None)


def emulate(trainer: Trainer, costs: BatchCosts, unit_s: float) -> SlowRoom:
    """Have this process' layers and copies take the costs' times from here on. Collective over all ranks.

    costs: with attention, the rest and copies as times of a forward; a backward takes twice as long. unit_s: of 1.
    """
    room = SlowRoom(trainer._host)
    trainer._host = room  # type: ignore[assignment]
    if costs.offload is not None:
        room.s_per_byte = costs.offload.copy_per_token * unit_s / _saved_bytes(trainer, room)
    ring_attention._kernel = lambda q, window: _Sleeping(costs.attention_per_square * unit_s)  # the process is its own
    for chunk in trainer.pipeline.chunks:
        for layer in chunk.layers.values():
            linear_s = costs.linear_per_token * unit_s
            layer.ffn.register_forward_hook(lambda module, inputs, output, s=linear_s: _Rest.apply(output, s))
    return room


def _saved_bytes(trainer: Trainer, room: SlowRoom) -> float:
    """What a layer saves of a token, as a step finds it that copies all of it out."""
    rank, ids = trainer.groups.coords["dp"], np.zeros(_PROBE_TOKENS, np.int64)
    whole = MicroBatch((SequenceSlice(0, 0, _PROBE_TOKENS),), offload_milli=MILLI)
    trainer.step(1, [PieceBatch(rank, whole, (_PROBE_TOKENS,), ids, ids)], 0.0)
    num_layers = sum(len(chunk.layers) for chunk in trainer.pipeline.chunks)
    found = room.num_bytes / (num_layers - RESIDENT_LAYERS) / _PROBE_TOKENS
    room.num_bytes = 0
    return found


def _pairs(blocks: Sequence[Block]) -> int:
    """Of queries and keys that see each other."""
    return sum(
        b.num_queries * (b.num_queries + 1) // 2 if b.is_diagonal else b.num_queries * b.num_keys for b in blocks
    )


class _Sleeping(BlockKernel):
    """A causal square of s tokens has s * s / 2 pairs and takes s * s of the unit."""

    def __init__(self, s_per_square: float) -> None:
        self._s_per_pair = 2 * s_per_square

    def forward_(self, sums: Sums, q_THD: Any, kv_2SKD: Any, meeting: Meeting, window: int | None) -> None:
        time.sleep(_pairs(meeting.blocks) * self._s_per_pair)

    def backward_(
        self, of_q_THD: Any, of_kv_2SKD: Any, results: Results, kv_2SKD: Any, meeting: Meeting, window: int | None
    ) -> None:
        time.sleep(2 * _pairs(meeting.blocks) * self._s_per_pair)


class _Rest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTh: torch.Tensor, s_per_token: float) -> torch.Tensor:
        ctx.seconds = x_BTh.shape[1] * s_per_token
        time.sleep(ctx.seconds)
        return x_BTh.view_as(x_BTh)

    @staticmethod
    def backward(ctx: Any, gradient_BTh: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient_BTh, None

"""Blocks of attention by torch's flash attention: all blocks with one kind of mask in one call, each a sequence.

It runs on NVIDIA GPUs in half precision. A call sees blocks as sequences whose ends are aligned: the last query of a
block sees the last key, and others as many fewer, or all see all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from hpc_train.parallel.attention_blocks import BlockKernel, Meeting, Results, Sums
from hpc_train.plan.ring_blocks import Block

# cited: limits of the kernels that torch has; Dao, "FlashAttention-2", 2023.
_LARGEST_HEAD = 256
_HEAD_UNIT = 8
_FIRST_CAPABILITY = (8, 0)


@final
@dataclass(frozen=True)
class _Call:
    """Blocks that are one call, on a device.

    is_diagonal: queries and keys are the same tokens. query_rows, key_rows: of all blocks, one behind the other.
    ends: where each block ends among them. longest: the most queries and keys of a block. runs: of each block its first
    row among all queries, and its start and stop among those of the call.
    """

    is_diagonal: bool
    query_rows: torch.Tensor
    key_rows: torch.Tensor
    ends: tuple[torch.Tensor, torch.Tensor]
    longest: tuple[int, int]
    runs: tuple[tuple[int, int, int], ...]

    @property
    def window_size_right(self) -> int:
        """As the operators want it, from the last query on; -1: all."""
        return 0 if self.is_diagonal else -1


@final
@dataclass(frozen=True)
class FlashKernel(BlockKernel):
    """forward, backward: torch's operators, or others with their arguments.

    Without windows: the operators take an open right side of a window for the longest number of keys, which hides keys
    from a block with more queries than that (cited: set_params_fprop in torch's flash_api.cpp).
    """

    forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward
    backward: Callable[..., Any] = torch.ops.aten._flash_attention_backward

    @staticmethod
    def takes(q_THD: torch.Tensor, window: int | None) -> bool:
        """Whether it can compute with such queries."""
        head_size = q_THD.shape[2]
        return (
            window is None
            and q_THD.device.type == "cuda"
            and q_THD.dtype in (torch.float16, torch.bfloat16)
            and head_size <= _LARGEST_HEAD
            and head_size % _HEAD_UNIT == 0
            and torch.cuda.get_device_capability(q_THD.device) >= _FIRST_CAPABILITY
        )

    def forward_(
        self, sums: Sums, q_THD: torch.Tensor, kv_2SKD: torch.Tensor, meeting: Meeting, window: int | None
    ) -> None:
        assert window is None, "tiles take windows"
        for call in _calls(meeting, q_THD.device):
            mean_tHD, log_Ht = self.forward(
                q_THD[call.query_rows], kv_2SKD[0, call.key_rows], kv_2SKD[1, call.key_rows], *call.ends, *call.longest,
                0.0, call.is_diagonal, False, window_size_left=-1, window_size_right=call.window_size_right,
            )[:2]  # fmt: skip
            for first, start, stop in call.runs:
                sums.merge_(first, mean_tHD[start:stop], log_Ht[:, start:stop].t())

    def backward_(
        self,
        of_q_THD: torch.Tensor,
        of_kv_2SKD: torch.Tensor,
        results: Results,
        kv_2SKD: torch.Tensor,
        meeting: Meeting,
        window: int | None,
    ) -> None:
        assert window is None, "tiles take windows"
        no_state = torch.zeros(2, dtype=torch.uint64, device=kv_2SKD.device)  # of a generator: nothing is dropped out
        for call in _calls(meeting, kv_2SKD.device):
            rows, keys = call.query_rows, call.key_rows
            of_q_tHD, of_k_sKD, of_v_sKD = self.backward(
                results.gradient_THD[rows], results.q_THD[rows], kv_2SKD[0, keys], kv_2SKD[1, keys],
                results.result_THD[rows], results.log_TH[rows].t().contiguous(), *call.ends, *call.longest, 0.0,
                call.is_diagonal, no_state, no_state[:0], window_size_left=-1,
                window_size_right=call.window_size_right,
            )  # fmt: skip
            of_q_THD.index_add_(0, rows, of_q_tHD.to(of_q_THD.dtype))
            of_kv_2SKD[0].index_add_(0, keys, of_k_sKD.to(of_kv_2SKD.dtype))
            of_kv_2SKD[1].index_add_(0, keys, of_v_sKD.to(of_kv_2SKD.dtype))


def _calls(meeting: Meeting, device: torch.device) -> list[_Call]:
    """Made once for all layers: each copy of a row's number to a GPU would wait for what that has still to do."""
    key = (FlashKernel, device)
    if key not in meeting.kept:
        kinds = {kind: [block for block in meeting.blocks if block.is_diagonal == kind] for kind in (False, True)}
        meeting.kept[key] = [_call(alike, kind, device) for kind, alike in kinds.items() if alike]
    calls: list[_Call] = meeting.kept[key]
    return calls


def _call(blocks: Sequence[Block], is_diagonal: bool, device: torch.device) -> _Call:
    queries = [(block.query, block.num_queries) for block in blocks]
    keys = [(block.key, block.num_keys) for block in blocks]
    rows = [torch.cat([torch.arange(first, first + count) for first, count in part]) for part in (queries, keys)]
    ends = [
        torch.cumsum(torch.tensor([0, *(count for _, count in part)]), 0, dtype=torch.int32) for part in (queries, keys)
    ]
    longest = [max(count for _, count in part) for part in (queries, keys)]
    return _Call(
        is_diagonal, rows[0].to(device), rows[1].to(device), (ends[0].to(device), ends[1].to(device)),
        (longest[0], longest[1]), tuple(_row_runs(blocks)),
    )  # fmt: skip


def _row_runs(blocks: Sequence[Block]) -> Iterator[tuple[int, int, int]]:
    """For each block its first row among all queries, and its start and stop among the gathered ones."""
    start = 0
    for block in blocks:
        yield block.query, start, start + block.num_queries
        start += block.num_queries

"""Blocks of attention by torch's flash attention: all blocks with one kind of mask in one call, each a sequence.

It runs on NVIDIA GPUs in half precision. A call sees blocks as sequences whose ends are aligned: the last query of a
block sees `right` keys behind the last one and `left` keys before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from hpc_train.parallel.attention_blocks import BlockKernel, Results, Sums
from hpc_train.plan.ring_blocks import Block

# cited: limits of the kernels that torch has; Dao, "FlashAttention-2", 2023.
_LARGEST_HEAD = 256
_HEAD_UNIT = 8
_FIRST_CAPABILITY = (8, 0)

_Kind = tuple[bool, int]
"""Whether queries and keys are the same tokens, and how many keys before the last one the last query sees (-1: all)."""


@final
@dataclass(frozen=True)
class FlashKernel(BlockKernel):
    """forward, backward: torch's operators, or others with their arguments."""

    forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward
    backward: Callable[..., Any] = torch.ops.aten._flash_attention_backward

    @staticmethod
    def takes(q_THD: torch.Tensor) -> bool:
        """Whether it can compute with such queries."""
        head_size = q_THD.shape[2]
        return (
            q_THD.device.type == "cuda"
            and q_THD.dtype in (torch.float16, torch.bfloat16)
            and head_size <= _LARGEST_HEAD
            and head_size % _HEAD_UNIT == 0
            and torch.cuda.get_device_capability(q_THD.device) >= _FIRST_CAPABILITY
        )

    def forward_(
        self, sums: Sums, q_THD: torch.Tensor, kv_2SKD: torch.Tensor, blocks: Sequence[Block], window: int | None
    ) -> None:
        for (is_diagonal, left), alike in _by_kind(blocks, window):
            query_rows, key_rows, ends, sizes = _gathered(alike, q_THD.device)
            mean_tHD, log_Ht = self.forward(
                q_THD[query_rows], kv_2SKD[0, key_rows], kv_2SKD[1, key_rows], *ends, *sizes, 0.0, is_diagonal, False,
                window_size_left=left, window_size_right=0 if is_diagonal else -1,
            )[:2]  # fmt: skip
            for first, start, stop in _row_runs(alike):
                sums.merge_(first, mean_tHD[start:stop], log_Ht[:, start:stop].t())

    def backward_(
        self,
        of_q_THD: torch.Tensor,
        of_kv_2SKD: torch.Tensor,
        results: Results,
        kv_2SKD: torch.Tensor,
        blocks: Sequence[Block],
        window: int | None,
    ) -> None:
        no_state = torch.zeros(2, dtype=torch.uint64, device=kv_2SKD.device)  # of a generator: nothing is dropped out
        for (is_diagonal, left), alike in _by_kind(blocks, window):
            query_rows, key_rows, ends, sizes = _gathered(alike, kv_2SKD.device)
            of_q_tHD, of_k_sKD, of_v_sKD = self.backward(
                results.gradient_THD[query_rows], results.q_THD[query_rows], kv_2SKD[0, key_rows],
                kv_2SKD[1, key_rows], results.result_THD[query_rows], results.log_TH[query_rows].t().contiguous(),
                *ends, *sizes, 0.0, is_diagonal, no_state, no_state[:0],
                window_size_left=left, window_size_right=0 if is_diagonal else -1,
            )  # fmt: skip
            of_q_THD.index_add_(0, query_rows, of_q_tHD.to(of_q_THD.dtype))
            of_kv_2SKD[0].index_add_(0, key_rows, of_k_sKD.to(of_kv_2SKD.dtype))
            of_kv_2SKD[1].index_add_(0, key_rows, of_v_sKD.to(of_kv_2SKD.dtype))


def _by_kind(blocks: Sequence[Block], window: int | None) -> Iterator[tuple[_Kind, list[Block]]]:
    """Blocks that go into one call together."""
    found: dict[_Kind, list[Block]] = {}
    for block in blocks:
        left = -1 if window is None else block.num_keys - 1 - (block.lead + block.num_queries - 1) + window - 1
        found.setdefault((block.is_diagonal, left), []).append(block)
    yield from found.items()


def _gathered(
    blocks: Sequence[Block], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor], tuple[int, int]]:
    """The blocks' rows of queries and of keys behind each other, where each block ends, and the longest ones."""
    queries = [(block.query, block.num_queries) for block in blocks]
    keys = [(block.key, block.num_keys) for block in blocks]
    rows = [torch.cat([torch.arange(first, first + count) for first, count in part]) for part in (queries, keys)]
    ends = [
        torch.cumsum(torch.tensor([0, *(count for _, count in part)]), 0, dtype=torch.int32) for part in (queries, keys)
    ]
    longest = [max(count for _, count in part) for part in (queries, keys)]
    return rows[0].to(device), rows[1].to(device), (ends[0].to(device), ends[1].to(device)), (longest[0], longest[1])


def _row_runs(blocks: Sequence[Block]) -> Iterator[tuple[int, int, int]]:
    """For each block its first row among all queries, and its start and stop among the gathered ones."""
    start = 0
    for block in blocks:
        yield block.query, start, start + block.num_queries
        start += block.num_queries

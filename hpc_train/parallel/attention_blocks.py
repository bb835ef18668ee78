"""Attention over blocks of queries and keys that are added up one after another, in any order; and its gradients.

What queries get of each block is merged by the logarithms of the sums of their weights, so the result does not depend
on which keys came first or from where. Kernels compute blocks: products of tiles here, `attention_flash` on a GPU. None
has a whole matrix of queries by keys at a time.

Shapes: T queries and S keys as rows, H query heads, K key/value heads, D head size; t and s of a tile.
Source of the merge: Dao et al., "FlashAttention", NeurIPS'22; Liu et al., "Ring attention with blockwise transformers
for near-infinite context", ICLR'24.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from hpc_train.plan.ring_blocks import Block

# assumed: scores of 8 heads of such a tile take 8 MiB in fp32; smaller ones cost more calls, larger ones leave caches.
_TILE_TOKENS = 512


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """In which sums are made."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@final
@dataclass(frozen=True)
class Sums:
    """What queries have got so far: their values' mean by weight, and the logarithm of the sum of the weights.

    mean_THD, log_TH: of `exact_type`; 0 and -inf where nothing was seen.
    """

    mean_THD: torch.Tensor
    log_TH: torch.Tensor

    @classmethod
    def nothing(cls, q_THD: torch.Tensor) -> Sums:
        mean_THD = torch.zeros_like(q_THD, dtype=exact_type(q_THD.dtype), memory_format=torch.contiguous_format)
        return cls(mean_THD, mean_THD.new_full(q_THD.shape[:2], -torch.inf))

    def merge_(self, first: int, mean_tHD: torch.Tensor, log_tH: torch.Tensor) -> None:
        """Add what the queries in rows from `first` on get of further keys."""
        rows = slice(first, first + len(log_tH))
        mine_tHD, mine_tH = self.mean_THD[rows], self.log_TH[rows]
        whole_tH = torch.logaddexp(mine_tH, log_tH)
        base_tH = whole_tH.masked_fill(whole_tH == -torch.inf, 0.0)
        mine_tHD.mul_((mine_tH - base_tH).exp_()[..., None])
        mine_tHD.addcmul_(mean_tHD.to(mine_tHD.dtype), (log_tH - base_tH).exp_()[..., None])
        mine_tH.copy_(whole_tH)


@final
@dataclass(frozen=True)
class Results:
    """What the backward needs of the queries and of what they got.

    log_TH: of all keys that they saw. dot_TH: of each query's result with the gradient of it, of `exact_type`.
    """

    q_THD: torch.Tensor
    result_THD: torch.Tensor
    gradient_THD: torch.Tensor
    log_TH: torch.Tensor
    dot_TH: torch.Tensor


@final
@dataclass(frozen=True)
class Meeting:
    """The blocks in which a member's queries meet some keys; none shares a query row with another on the same key.

    kept: what kernels have made of them for themselves, so that it is made once for all layers and both ways.
    """

    blocks: Sequence[Block]
    kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)


class BlockKernel(ABC):
    """Computes blocks."""

    @abstractmethod
    def forward_(
        self, sums: Sums, q_THD: torch.Tensor, kv_2SKD: torch.Tensor, meeting: Meeting, window: int | None
    ) -> None:
        """Merge what the blocks' queries get of their keys into the sums."""

    @abstractmethod
    def backward_(
        self,
        of_q_THD: torch.Tensor,
        of_kv_2SKD: torch.Tensor,
        results: Results,
        kv_2SKD: torch.Tensor,
        meeting: Meeting,
        window: int | None,
    ) -> None:
        """Add the blocks' part of the gradients of queries, keys and values, of `exact_type`."""


@final
class TileKernel(BlockKernel):
    """Products of tiles, on any device and in any type."""

    def forward_(
        self, sums: Sums, q_THD: torch.Tensor, kv_2SKD: torch.Tensor, meeting: Meeting, window: int | None
    ) -> None:
        for tile in _tiles(meeting.blocks, window):
            scores_KRs, _ = _scores(tile, q_THD, kv_2SKD, window)
            log_KR = scores_KRs.logsumexp(dim=2)
            base_KR = log_KR.masked_fill(log_KR == -torch.inf, 0.0)
            weights_KRs = scores_KRs.sub_(base_KR[..., None]).exp_()
            mean_KRD = weights_KRs @ _of_keys(kv_2SKD[1], tile, weights_KRs.dtype)
            sums.merge_(tile.query, _by_rows(mean_KRD, tile), _by_rows(log_KR[..., None], tile)[..., 0])

    def backward_(
        self,
        of_q_THD: torch.Tensor,
        of_kv_2SKD: torch.Tensor,
        results: Results,
        kv_2SKD: torch.Tensor,
        meeting: Meeting,
        window: int | None,
    ) -> None:
        num_kv_heads = kv_2SKD.shape[2]
        for tile in _tiles(meeting.blocks, window):
            scores_KRs, q_KRD = _scores(tile, results.q_THD, kv_2SKD, window)
            exact = scores_KRs.dtype
            log_KR1, dot_KR1 = (
                _of_queries(of_rows[..., None], tile, num_kv_heads, exact)
                for of_rows in (results.log_TH, results.dot_TH)
            )
            gradient_KRD = _of_queries(results.gradient_THD, tile, num_kv_heads, exact)
            weights_KRs = scores_KRs.sub_(log_KR1).exp_()
            keys = slice(tile.key, tile.key + tile.num_keys)
            of_kv_2SKD[1, keys] += (weights_KRs.transpose(1, 2) @ gradient_KRD).transpose(0, 1)
            of_scores_KRs = gradient_KRD @ _of_keys(kv_2SKD[1], tile, exact).transpose(1, 2)
            of_scores_KRs.sub_(dot_KR1).mul_(weights_KRs).mul_(_scale(results.q_THD))
            of_kv_2SKD[0, keys] += (of_scores_KRs.transpose(1, 2) @ q_KRD).transpose(0, 1)
            of_q_KRD = of_scores_KRs @ _of_keys(kv_2SKD[0], tile, exact)
            of_q_THD[tile.query : tile.query + tile.num_queries] += _by_rows(of_q_KRD, tile)


def _tiles(blocks: Sequence[Block], window: int | None) -> Iterator[Block]:
    """The blocks cut into tiles, without those in which nothing is seen."""
    for block in blocks:
        for query in range(0, block.num_queries, _TILE_TOKENS):
            num_queries = min(_TILE_TOKENS, block.num_queries - query)
            for key in range(0, block.num_keys, _TILE_TOKENS):
                num_keys = min(_TILE_TOKENS, block.num_keys - key)
                lead = block.lead + query - key
                is_before = lead + num_queries - 1 < 0
                is_too_far = window is not None and num_keys - 1 <= lead - window
                if not is_before and not is_too_far:
                    yield Block(block.query + query, num_queries, block.key + key, num_keys, lead)


def _scores(
    tile: Block, q_THD: torch.Tensor, kv_2SKD: torch.Tensor, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(K, R, s), -inf where a query does not see a key, and the queries: R = t * H / K rows of each key head."""
    exact = exact_type(q_THD.dtype)
    q_KRD = _of_queries(q_THD, tile, kv_2SKD.shape[2], exact)
    scores_KRs = (q_KRD @ _of_keys(kv_2SKD[0], tile, exact).transpose(1, 2)).mul_(_scale(q_THD))
    sees_all_before = tile.lead >= tile.num_keys - 1
    is_within_window = window is None or tile.lead + tile.num_queries - 1 - window < 0
    if not (sees_all_before and is_within_window):
        behind_ts = torch.arange(tile.num_queries, device=q_THD.device)[:, None] + tile.lead
        behind_ts = behind_ts - torch.arange(tile.num_keys, device=q_THD.device)
        is_hidden_ts = behind_ts < 0 if window is None else (behind_ts < 0) | (behind_ts >= window)
        scores_KRs.view(len(scores_KRs), -1, *is_hidden_ts.shape).masked_fill_(is_hidden_ts, -torch.inf)
    return scores_KRs, q_KRD


def _scale(q_THD: torch.Tensor) -> float:
    return float(q_THD.shape[2]) ** -0.5


def _of_keys(rows_SKD: torch.Tensor, tile: Block, dtype: torch.dtype) -> torch.Tensor:
    """(K, s, D)"""
    return rows_SKD[tile.key : tile.key + tile.num_keys].to(dtype).transpose(0, 1)


def _of_queries(rows_THD: torch.Tensor, tile: Block, num_kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """(K, R, D): a key head's query heads one behind the other, each with all its rows."""
    rows_tHD = rows_THD[tile.query : tile.query + tile.num_queries].to(dtype)
    rows_KGtD = rows_tHD.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    return rows_KGtD.reshape(num_kv_heads, -1, rows_THD.shape[2])


def _by_rows(of_heads_KRD: torch.Tensor, tile: Block) -> torch.Tensor:
    """(t, H, D)"""
    return of_heads_KRD.unflatten(1, (-1, tile.num_queries)).permute(2, 0, 1, 3).flatten(1, 2)

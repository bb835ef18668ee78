"""Attention's core: causal, within documents, and within a window of tokens, at the cost of what is seen.

Shapes: B sequences, T tokens a sequence, H query heads, K key/value heads, D head size; a windowed core cuts a sequence
into n tiles of t queries, each of which sees at most s = t + window - 1 keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import final

import torch
import torch.nn.functional as F

# Queries of a tile are multiplied with all keys that any of them sees, so a small tile wastes little and a large one
# copies each key less often. Half a window wastes half; below 64 the products get too small (measured on one CPU core,
# 4096 tokens of 8 heads of 64: windows of 128 and 512 are fastest with 64 to 256 queries).
_SMALLEST_TILE = 64


class AttentionCore(ABC):
    """Knows which tokens of one micro-batch see which, and computes what they get."""

    @abstractmethod
    def attend(
        self, q_BHTD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """What each query gets of the values that it sees: (B, H, T, D).

        window: of a layer: how many tokens a query sees at most, itself the last of them; None for all before it.
        """


@final
@dataclass(frozen=True)
class AttentionPlan(AttentionCore):
    """Whole sequences, each a row: a token sees those before it in its document.

    With a window attention costs T * window, in time and in memory.

    document_BT: the number of each token's document, or None when every sequence is one document.
    """

    document_BT: torch.Tensor | None
    _masks: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_boundaries(
        cls, boundaries: tuple[tuple[int, ...], ...], seq_len: int, device: torch.device
    ) -> AttentionPlan:
        """From the lengths of the documents' pieces in each sequence; lengths add up to seq_len."""
        if all(len(lengths) == 1 for lengths in boundaries):
            return cls(None)
        document_BT = torch.stack(
            [torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) for lengths in boundaries]
        )
        assert document_BT.shape[1] == seq_len
        return cls(document_BT.to(device))

    def attend(
        self, q_BHTD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        num_tokens = q_BHTD.shape[2]
        if window is None or window >= num_tokens:
            return _attend(q_BHTD, k_BKTD, v_BKTD, self.whole_mask())
        tiles = _Tiles(num_tokens, window)
        mask_n1ts = self.window_mask(tiles, q_BHTD.shape[0], q_BHTD.device)
        y_nHtD = _attend(tiles.of_queries(q_BHTD), tiles.of_keys(k_BKTD), tiles.of_keys(v_BKTD), mask_n1ts)
        return tiles.joined(y_nHtD)

    def whole_mask(self) -> torch.Tensor | None:
        """(B, 1, T, T) bool, True where a query (dim 2) sees a key (dim 3); None where plain causal attention does."""
        if self.document_BT is None:
            return None
        if () not in self._masks:
            same_BTT = self.document_BT[:, :, None] == self.document_BT[:, None, :]
            self._masks[()] = same_BTT.tril_()[:, None]
        return self._masks[()]

    def window_mask(self, tiles: _Tiles, num_sequences: int, device: torch.device) -> torch.Tensor:
        """(B * n, 1, t, s) bool, made once for all layers with this window."""
        key = (num_sequences, tiles.num_tokens, tiles.window)
        if key not in self._masks:
            self._masks[key] = tiles.mask(num_sequences, self.document_BT, device)
        return self._masks[key]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    has_groups = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=has_groups)


class _Tiles:
    """A sequence cut into tiles of queries, each with the keys that any of them sees.

    Behind the last token there is padding, which sees itself and which no token sees.
    """

    def __init__(self, num_tokens: int, window: int) -> None:
        self.num_tokens, self.window = num_tokens, window
        self.count = -(-num_tokens // min(max(_SMALLEST_TILE, window // 2), num_tokens))
        self.size = -(-num_tokens // self.count)
        self.num_keys = self.size + window - 1
        self.padding = self.count * self.size - num_tokens

    def of_queries(self, q_BHTD: torch.Tensor) -> torch.Tensor:
        """(B * n, H, t, D)"""
        B, H, _, D = q_BHTD.shape
        padded_BHntD = F.pad(q_BHTD, (0, 0, 0, self.padding)).view(B, H, self.count, self.size, D)
        return padded_BHntD.transpose(1, 2).reshape(B * self.count, H, self.size, D)

    def of_keys(self, k_BKTD: torch.Tensor) -> torch.Tensor:
        """(B * n, K, s, D), a copy: neighbouring tiles share window - 1 keys."""
        B, K, _, D = k_BKTD.shape
        padded = F.pad(k_BKTD, (0, 0, self.window - 1, self.padding))
        tiles_BKnDs = padded.unfold(2, self.num_keys, self.size)
        return tiles_BKnDs.permute(0, 2, 1, 4, 3).reshape(B * self.count, K, self.num_keys, D)

    def joined(self, y_nHtD: torch.Tensor) -> torch.Tensor:
        """(B, H, T, D), from the tiles of all sequences."""
        _, H, _, D = y_nHtD.shape
        y_BHntD = y_nHtD.view(-1, self.count, H, self.size, D).transpose(1, 2)
        return y_BHntD.reshape(-1, H, self.count * self.size, D)[:, :, : self.num_tokens]

    def mask(self, num_sequences: int, document_BT: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """(B * n, 1, t, s) bool, True where a query sees a key."""
        place_t1 = torch.arange(self.size, device=device)[:, None]
        key_s = torch.arange(self.num_keys, device=device)
        band_ts = (key_s >= place_t1) & (key_s < place_t1 + self.window)
        first_key_n11 = torch.arange(self.count, device=device)[:, None, None] * self.size - (self.window - 1)
        mask_nts = band_ts & (first_key_n11 + key_s >= 0)
        if document_BT is None:
            mask_Bnts = mask_nts.expand(num_sequences, -1, -1, -1)
        else:
            padded = F.pad(document_BT, (self.window - 1, self.padding), value=-1)
            key_Bn1s = padded.unfold(1, self.num_keys, self.size)[:, :, None]
            query_Bnt1 = padded[:, self.window - 1 :].view(num_sequences, self.count, self.size, 1)
            mask_Bnts = mask_nts & (key_Bn1s == query_Bnt1)
        return mask_Bnts.reshape(-1, 1, self.size, self.num_keys)

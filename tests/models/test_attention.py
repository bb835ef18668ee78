"""Windowed attention: exactly a masked full attention, at a cost that grows with tokens * window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.models.attention import AttentionPlan

CPU = torch.device("cpu")


def _heads(num_sequences: int, num_heads: int, kv_heads: int, num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_sequences, heads, num_tokens, 6) for heads in (num_heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def _masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: tuple[tuple[int, ...], ...], window: int
) -> torch.Tensor:
    """Softmax over all scores, token by token, with what is not seen at minus infinity."""
    per_kv = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(per_kv, dim=1), v.repeat_interleave(per_kv, dim=1)
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    sees = torch.zeros(len(boundaries), 1, q.shape[2], q.shape[2], dtype=torch.bool)
    for index, lengths in enumerate(boundaries):
        start = 0
        for length in lengths:
            for token in range(start, start + length):
                sees[index, 0, token, max(start, token - window + 1) : token + 1] = True
            start += length
    return scores.masked_fill(~sees, -torch.inf).softmax(dim=3) @ v


@st.composite
def _boundaries(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    num_tokens = draw(st.integers(1, 200))
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        cuts = sorted({0, num_tokens, *draw(st.lists(st.integers(0, num_tokens), max_size=4))})
        rows.append(tuple(b - a for a, b in pairwise(cuts)))
    return tuple(rows)


@settings(max_examples=40, deadline=None)
@given(boundaries=_boundaries(), window=st.integers(1, 210), kv_heads=st.sampled_from([1, 2, 4]))
def test_a_window_is_a_masked_full_attention_in_values_and_gradients(
    boundaries: tuple[tuple[int, ...], ...], window: int, kv_heads: int
) -> None:
    num_tokens = sum(boundaries[0])
    qkv = _heads(len(boundaries), 4, kv_heads, num_tokens)
    ours = AttentionPlan.from_boundaries(boundaries, num_tokens, CPU).attend(*qkv, window)
    theirs = _masked(*qkv, boundaries, window)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    weights = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for mine, reference in zip(
        torch.autograd.grad(ours, qkv, weights), torch.autograd.grad(theirs, qkv, weights), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-12)


@contextmanager
def _counted_scores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many products of a query with a key each call of the attention kernel has, and the elements of its mask."""
    counts: list[int] = []
    plain = F.scaled_dot_product_attention

    def count(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        mask = options["attn_mask"]
        counts.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
        counts.append(mask.numel() if isinstance(mask, torch.Tensor) else 0)
        return plain(q, k, v, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", count)
        yield counts


@pytest.mark.parametrize("with_documents", [False, True])
def test_work_and_masks_of_a_window_grow_with_tokens_times_window(
    monkeypatch: pytest.MonkeyPatch, with_documents: bool
) -> None:
    """Half a window too much at most, for windows of 128 and more; full attention has T / 2 for each token."""
    for window in (128, 512):
        for num_tokens in (1024, 4096, 16384):
            qkv = [torch.zeros(1, 2, num_tokens, 1) for _ in range(3)]
            lengths = (300, num_tokens - 300) if with_documents else (num_tokens,)
            plan = AttentionPlan.from_boundaries((lengths,), num_tokens, CPU)
            with _counted_scores(monkeypatch) as counts:
                plan.attend(*qkv, window)
            scores, mask = counts
            assert scores == 2 * mask
            assert num_tokens * window <= mask <= 1.5 * num_tokens * window
            assert all(made.numel() == mask for made in plan._masks.values())


def test_a_window_as_long_as_the_sequence_is_full_attention() -> None:
    qkv = _heads(2, 4, 2, 40)
    plan = AttentionPlan(None)
    full = plan.attend(*qkv, None)
    assert torch.equal(plan.attend(*qkv, 40), full)
    assert torch.equal(plan.attend(*qkv, 999), full)
    assert not torch.allclose(plan.attend(*qkv, 39), full)


def test_layers_with_the_same_window_share_a_mask() -> None:
    qkv = _heads(1, 2, 2, 100)
    plan = AttentionPlan.from_boundaries(((60, 40),), 100, CPU)
    for window in (7, 7, 9, None, None):
        plan.attend(*qkv, window)
    assert len(plan._masks) == 3

"""The head's loss in chunks against whole logits, alone and with the vocabulary shared by ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hpc_train.models import loss
from hpc_train.models.loss import SharedVocabulary, head_loss
from tests.ranks import TestRank, run_ranks

N, H, V = 37, 8, 11


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x_NH = torch.randn(N, H, generator=generator, dtype=dtype)
    weight_VH = torch.randn(V, H, generator=generator, dtype=dtype)
    labels_N = torch.randint(0, V, (N,), generator=generator)
    labels_N[::5] = -100
    labels_N[20:30] = -100
    return x_NH, weight_VH, labels_N


def _expected(x_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor) -> list[torch.Tensor]:
    x_NH, weight_VH = x_NH.clone().requires_grad_(), weight_VH.clone().requires_grad_()
    whole = F.cross_entropy((x_NH @ weight_VH.t()), labels_N, ignore_index=-100, reduction="sum")
    (3.0 * whole).backward()
    assert x_NH.grad is not None and weight_VH.grad is not None
    return [whole.detach(), x_NH.grad, weight_VH.grad]


@pytest.mark.parametrize("tokens", [1, 4, N, 100])
def test_loss_and_gradients_are_those_of_whole_logits(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss.LOGITS_BYTES, "cpu", 4 * V * tokens)
    x_NH, weight_VH, labels_N = _inputs()
    expected = _expected(x_NH, weight_VH, labels_N)
    x_NH.requires_grad_(), weight_VH.requires_grad_()
    found = head_loss(x_NH, weight_VH, labels_N)
    (3.0 * found).backward()
    for ours, theirs in zip((found.detach(), x_NH.grad, weight_VH.grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_large_logits_overflow_nothing() -> None:
    x_NH, weight_VH, labels_N = _inputs(torch.float32)
    expected = _expected(100 * x_NH, 100 * weight_VH, labels_N)[0]
    torch.testing.assert_close(head_loss(100 * x_NH, 100 * weight_VH, labels_N), expected)


def test_bf16_is_summed_in_fp32() -> None:
    x_NH, weight_VH, labels_N = _inputs(torch.bfloat16)
    expected = _expected(x_NH.float(), weight_VH.float(), labels_N)
    x_NH.requires_grad_(), weight_VH.requires_grad_()
    found = head_loss(x_NH, weight_VH, labels_N)
    assert found.dtype == torch.float32
    (3.0 * found).backward()
    assert x_NH.grad is not None and x_NH.grad.dtype == torch.bfloat16
    # A logit is rounded to 8 bits, of logits up to 9; a gradient of 1 likewise.
    torch.testing.assert_close(found, expected[0], rtol=1e-2, atol=0.0)
    torch.testing.assert_close(x_NH.grad.float(), expected[1], rtol=5e-2, atol=0.15)


def test_without_supervised_tokens_it_is_an_exact_zero_that_reaches_all() -> None:
    """FC-87"""
    x_NH, weight_VH, labels_N = _inputs()
    x_NH.requires_grad_(), weight_VH.requires_grad_()
    found = head_loss(x_NH, weight_VH, torch.full_like(labels_N, -100))
    found.backward()
    assert found == 0.0
    assert x_NH.grad is not None and weight_VH.grad is not None
    assert not x_NH.grad.any() and not weight_VH.grad.any()


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    x_NH, weight_VH, labels_N = _inputs()
    x_NH.requires_grad_()
    with torch.no_grad():
        found = head_loss(x_NH, weight_VH, labels_N)
    assert not found.requires_grad
    torch.testing.assert_close(found, _expected(x_NH.detach(), weight_VH, labels_N)[0])


def _shared(me: TestRank) -> list[Any]:
    from hpc_train.comm.collectives import all_gather_
    from tests.worlds import make_group

    group = make_group(me)
    start, stop = V * me.rank // me.world_size, V * (me.rank + 1) // me.world_size
    loss.LOGITS_BYTES["cpu"] = 4 * 4 * 5  # 5 tokens at a time of the largest share, 6 of a smaller one alone
    x_NH, weight_VH, labels_N = _inputs()
    mine = weight_VH[start:stop].clone().requires_grad_()
    x_NH.requires_grad_()
    shared = SharedVocabulary(
        start, -(-V // me.world_size), me.rank, me.world_size, lambda of_ranks: all_gather_(of_ranks.view(-1), group)
    )
    found = head_loss(x_NH, mine, labels_N, shared)
    (3.0 * found).backward()
    assert x_NH.grad is not None and mine.grad is not None
    return [found.item(), x_NH.grad.tolist(), mine.grad.tolist()]


def test_ranks_that_share_the_vocabulary_unevenly_have_the_whole_one_s_loss() -> None:
    results = run_ranks(_shared, 3)
    expected = _expected(*_inputs())
    assert all(result[0] == pytest.approx(expected[0].item(), rel=1e-12) for result in results)
    x_gradient = sum(torch.tensor(result[1], dtype=torch.float64) for result in results)
    torch.testing.assert_close(x_gradient, expected[1], rtol=1e-11, atol=1e-12)
    of_weights = [torch.tensor(result[2], dtype=torch.float64) for result in results]
    assert [len(part) for part in of_weights] == [3, 4, 4]
    torch.testing.assert_close(torch.cat(of_weights), expected[2], rtol=1e-11, atol=1e-12)

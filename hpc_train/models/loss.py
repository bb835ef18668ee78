"""The output head and its loss in one, in chunks of tokens: logits of more than one chunk never exist.

A chunk's logits become its part of the loss, then in place the gradient of themselves, and are multiplied at once into
the gradients of the head's input and weight. So nothing as wide as the vocabulary waits for the backward, no product
is made twice, and on a CPU a chunk stays in the cache.

Shapes: N tokens, n of them in a chunk, h hidden size, V token ids of this head.
Idea: Hsu et al., "Liger Kernel: efficient Triton kernels for LLM training", 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LOGITS_BYTES = {"cpu": 2**22, "cuda": 2**29}
"""Of a chunk, in fp32. CPU: measured with 1024 tokens, 8192 ids and h = 256: 2, 4 and 8 MiB took 0.91, 0.75 and 0.80 of
the time of whole logits. CUDA: assumed; large products with room to spare."""

Gather = Callable[[torch.Tensor], None]
"""Fill a (ranks, 2, n) buffer, of which this rank's part is there, with the parts of all."""


@dataclass(frozen=True)
class SharedVocabulary:
    """Of a head that has a range of the token ids while other ranks have the others: which, and how to hear from them.

    most_ids: of any rank, so that all have chunks of the same tokens.
    """

    first_id: int
    most_ids: int
    rank: int
    num_ranks: int
    gather: Gather


def head_loss(
    x_Nh: torch.Tensor, weight_Vh: torch.Tensor, labels_N: torch.Tensor, shared: SharedVocabulary | None = None
) -> torch.Tensor:
    """Cross entropy of x weight^T summed over the labels that are not -100: scalar of fp32 or better, in nats.

    Without such a label it is an exact zero that still reaches x and the weight.

    Args:
        labels_N: int64, ids of the whole vocabulary.
        shared: Given where the head is split over ranks; all of them call together, and the gradient of x is this
            rank's summand.
    """
    return _HeadLoss.apply(x_Nh, weight_Vh, labels_N, shared, torch.is_grad_enabled())


def tokens_in_chunk(vocabulary: int, device_type: str) -> int:
    """How many tokens' logits over so many ids exist at a time."""
    return max(1, LOGITS_BYTES.get(device_type, LOGITS_BYTES["cuda"]) // (4 * vocabulary))


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_Nh: torch.Tensor,
        weight_Vh: torch.Tensor,
        labels_N: torch.Tensor,
        shared: SharedVocabulary | None,
        has_backward: bool,
    ) -> torch.Tensor:
        exact = torch.float64 if x_Nh.dtype == torch.float64 else torch.float32
        loss = torch.zeros((), dtype=exact, device=x_Nh.device)
        x_gradient = torch.empty_like(x_Nh) if has_backward else None
        weight_gradient = torch.zeros_like(weight_Vh, dtype=exact) if has_backward else None
        size = tokens_in_chunk(len(weight_Vh) if shared is None else shared.most_ids, x_Nh.device.type)
        for start in range(0, len(x_Nh), size):
            x_nh, labels_n = x_Nh[start : start + size], labels_N[start : start + size]
            logits_nV = (x_nh @ weight_Vh.t()).to(exact)
            loss += _to_gradient_(logits_nV, labels_n, shared)
            if x_gradient is None or weight_gradient is None:
                continue
            gradient_nV = logits_nV.to(x_Nh.dtype)
            torch.mm(gradient_nV, weight_Vh, out=x_gradient[start : start + size])
            if x_Nh.dtype == exact:
                weight_gradient.addmm_(gradient_nV.t(), x_nh)
            else:
                weight_gradient.add_(gradient_nV.t() @ x_nh)
        if has_backward:
            ctx.save_for_backward(x_gradient, weight_gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        x_gradient, weight_gradient = ctx.saved_tensors
        of_weight = weight_gradient.mul_(gradient).to(x_gradient.dtype)
        return x_gradient.mul_(gradient), of_weight, None, None, None


def _to_gradient_(logits_nV: torch.Tensor, labels_n: torch.Tensor, shared: SharedVocabulary | None) -> torch.Tensor:
    """The chunk's loss; its logits become their gradient."""
    is_supervised_n = labels_n != -100
    local_n = labels_n - (0 if shared is None else shared.first_id)
    is_here_n = is_supervised_n & (local_n >= 0) & (local_n < logits_nV.shape[1])
    index_n1 = local_n.masked_fill(~is_here_n, 0)[:, None]
    picked_n = logits_nV.gather(1, index_n1)[:, 0].masked_fill_(~is_here_n, 0.0)
    most_n = logits_nV.amax(dim=1)
    total_n = logits_nV.sub_(most_n[:, None]).exp_().sum(dim=1)
    log_sum_n = most_n + total_n.log()
    scale_n = is_supervised_n / total_n
    if shared is not None:
        of_ranks_r2n = logits_nV.new_empty(shared.num_ranks, 2, len(labels_n))
        of_ranks_r2n[shared.rank, 0], of_ranks_r2n[shared.rank, 1] = log_sum_n, picked_n
        shared.gather(of_ranks_r2n)
        whole_n, picked_n = of_ranks_r2n[:, 0].logsumexp(dim=0), of_ranks_r2n[:, 1].sum(dim=0)
        scale_n *= (log_sum_n - whole_n).exp_()
        log_sum_n = whole_n
    logits_nV.mul_(scale_n[:, None]).scatter_add_(1, index_n1, -is_here_n[:, None].to(logits_nV.dtype))
    return (log_sum_n - picked_n).masked_fill_(~is_supervised_n, 0.0).sum()

"""Tensor and sequence parallel: dress a plain model so that a tp group computes it together.

A serial block is entered and left once by attention and once by the feed-forward part, a parallel block once in all.
Inside, every rank has its share of the heads or features; outside, all have the whole residual stream, or with sequence
parallel a share of its tokens.

entering: x as it is, gradients summed          | with sequence parallel: all-gather, gradients reduce-scattered
leaving:  partial sums added, gradient as it is | with sequence parallel: reduce-scatter, gradient all-gathered

The backward of entering is a leaving of gradients, and the other way round, so both run in the same tiles
(`exchange`). Linears keep their names and hold this rank's part; what reads or writes the stream is multiplied with
them here, and not by them.

Source: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing activation recomputation in large
transformer models", MLSys'23.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpc_train.comm.collectives import all_gather_, all_reduce_
from hpc_train.comm.tokens import all_gather_tokens, reduce_scatter_tokens
from hpc_train.config import ModelConfig
from hpc_train.models.loss import SharedVocabulary, head_loss
from hpc_train.models.transformer import Attention, Block, ParallelBlock, Part, Transformer
from hpc_train.parallel.exchange import Exchange, Factor
from hpc_train.parallel.split_backward import QueuedWeight
from hpc_train.plan.parameters import TensorSplit


class _Entered(torch.autograd.Function):
    """Products of the same input with the weights of several linears.

    In the backward the sum of the input's gradient is begun first, and the weights' gradients are made beside it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BTh: torch.Tensor,
        exchange: Exchange,
        queued: Sequence[QueuedWeight | None],
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """parameters: all weights, then all biases, None where a linear has none."""
        weights, biases = parameters[: len(queued)], parameters[len(queued) :]
        factors = [Factor(weight.t(), bias) for weight, bias in zip(weights, biases, strict=True)]  # type: ignore[union-attr]
        whole_BTh, products = exchange.enter(x_BTh, factors)
        ctx.exchange, ctx.queued, ctx.has_bias = exchange, queued, [bias is not None for bias in biases]
        ctx.save_for_backward(whole_BTh, *weights)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole_BTh, *weights = ctx.saved_tensors
        leaving = ctx.exchange.leave(gradients, weights)
        of_weights = [_of_weight(*each, whole_BTh) for each in zip(ctx.queued, gradients, strict=True)]
        of_biases = [
            gradient.flatten(0, 1).sum(dim=0) if has_bias and queued is None else None
            for has_bias, queued, gradient in zip(ctx.has_bias, ctx.queued, gradients, strict=True)
        ]
        return leaving.wait(), None, None, *of_weights, *of_biases


class _Weight(torch.autograd.Function):
    """x as it is, on its way to `_Left`; its backward makes the weight's gradient.

    It is apart because recomputation ends with the last tensor that a backward needs: were x kept by `_Left`, that
    would have to leave once more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BTf: torch.Tensor,
        weight: torch.Tensor,
        queued: QueuedWeight | None,
        whole_gradients: list[torch.Tensor],
    ) -> torch.Tensor:
        ctx.queued, ctx.whole_gradients = queued, whole_gradients
        ctx.save_for_backward(x_BTf)
        return x_BTf.view_as(x_BTf)

    @staticmethod
    def backward(ctx: Any, gradient_BTf: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x_BTf,) = ctx.saved_tensors
        return gradient_BTf, _of_weight(ctx.queued, ctx.whole_gradients.pop(), x_BTf), None, None


class _Left(torch.autograd.Function):
    """The sum over the group of the products of inputs with the weights of a linear each."""

    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        weights: Sequence[torch.Tensor],
        whole_gradients: list[torch.Tensor],
        *xs: torch.Tensor,
    ) -> torch.Tensor:
        # Weights are leaves and need no saving; see `_Weight` on why it would cost.
        ctx.exchange, ctx.weights, ctx.whole_gradients = exchange, weights, whole_gradients
        return exchange.leave(xs, [weight.t() for weight in weights]).wait()

    @staticmethod
    def backward(ctx: Any, gradient_BTh: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole_BTh, of_xs = ctx.exchange.enter(gradient_BTh, [Factor(weight) for weight in ctx.weights])
        ctx.whole_gradients.extend([whole_BTh] * len(of_xs))
        return None, None, None, *of_xs


def _of_weight(queued: QueuedWeight | None, gradient_BTo: torch.Tensor, x_BTi: torch.Tensor) -> torch.Tensor | None:
    """A weight's gradient, unless it is left to a queue."""
    if queued is None:
        return gradient_BTo.flatten(0, 1).t() @ x_BTi.flatten(0, 1)
    queued.queue.add(queued.weight, queued.bias, x_BTi, gradient_BTo)
    return None


def entered(x_BTh: torch.Tensor, linears: Sequence[nn.Module], exchange: Exchange) -> list[torch.Tensor]:
    """What linears make of the same input: (B, T, out/tp) each. Collective over the tp group."""
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    queued = [getattr(linear, "queued", None) for linear in linears]
    return list(_Entered.apply(x_BTh, exchange, queued, *weights, *biases))


def left(xs: Sequence[torch.Tensor], linears: Sequence[nn.Module], exchange: Exchange) -> torch.Tensor:
    """The sum of what linears with split inputs make of one input each; biases are added behind. Collective over the
    tp group.
    """
    whole_gradients: list[torch.Tensor] = []  # of _Left's backward for each _Weight's
    kept = []
    for x_BTf, linear in zip(xs, linears, strict=True):
        queued = getattr(linear, "queued", None)
        # A rank's bias sees its own tokens only, so its gradient is not the queue's.
        queued = None if queued is None else QueuedWeight(queued.queue, queued.weight)
        kept.append(_Weight.apply(x_BTf, linear.weight, queued, whole_gradients))
    y_BTh = _Left.apply(exchange, [linear.weight for linear in linears], whole_gradients, *kept)
    for linear in linears:
        y_BTh = y_BTh if linear.bias is None else y_BTh.add_(linear.bias)
    return y_BTh


def shared_parts(
    exchange: Exchange, x_BTh: torch.Tensor, parts: Sequence[tuple[Part, tuple[Any, ...]]]
) -> torch.Tensor:
    """What `models.transformer.sum_of_parts` gives, by a tp group: entered and left once by all parts together."""
    reads = [getattr(part, name) for part, _ in parts for name in part.reads]
    products = entered(x_BTh, reads, exchange)
    made = [part.inner(*(products.pop(0) for _ in part.reads), *context) for part, context in parts]
    return left(made, [getattr(part, part.writes) for part, _ in parts], exchange)


class _Enter(torch.autograd.Function):
    """The input of what is not a product: whole sequences, whose gradient comes in partial sums."""

    @staticmethod
    def forward(ctx: Any, x_BTh: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return all_gather_tokens(x_BTh, exchange.group) if exchange.by_tokens else x_BTh.view_as(x_BTh)

    @staticmethod
    def backward(ctx: Any, partial_BTh: torch.Tensor) -> tuple[torch.Tensor, None]:
        exchange = ctx.exchange
        if exchange.by_tokens:
            return reduce_scatter_tokens(partial_BTh, exchange.group), None
        return all_reduce_(partial_BTh.clone(), exchange.group), None


class _Leave(torch.autograd.Function):
    """Partial sums without a product to leave beside."""

    @staticmethod
    def forward(ctx: Any, partial_BTh: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        if exchange.by_tokens:
            return reduce_scatter_tokens(partial_BTh, exchange.group)
        ctx.mark_dirty(partial_BTh)
        return all_reduce_(partial_BTh, exchange.group)

    @staticmethod
    def backward(ctx: Any, gradient_BTh: torch.Tensor) -> tuple[torch.Tensor, None]:
        exchange = ctx.exchange
        return all_gather_tokens(gradient_BTh, exchange.group) if exchange.by_tokens else gradient_BTh, None


class VocabularyEmbedding(nn.Module):
    """An embedding whose rows are split: each rank looks up its own token ids, and the results are added."""

    def __init__(self, plain: nn.Embedding, ids: range, exchange: Exchange) -> None:
        super().__init__()
        self.weight = nn.Parameter(plain.weight.new_empty(len(ids), plain.embedding_dim))
        self._ids, self._exchange = ids, exchange

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        local_BT = tokens_BT - self._ids.start
        foreign_BT = (local_BT < 0) | (local_BT >= len(self._ids))
        x_BTh = F.embedding(local_BT.masked_fill_(foreign_BT, 0), self.weight)
        return _Leave.apply(x_BTh.masked_fill_(foreign_BT[..., None], 0.0), self._exchange)


class TensorParallelTransformer(Transformer):
    """A Transformer, or a part of one, of which this rank computes its share."""

    def __init__(
        self, config: ModelConfig, max_seq_len: int, split: TensorSplit, exchange: Exchange, **part: Any
    ) -> None:
        super().__init__(config, max_seq_len, **part)
        self._split, self._exchange = split, exchange
        if exchange.by_tokens:
            self.stream_part = (split.tp_rank, split.tp)
        ids = split.vocabulary(config)
        if self.embedding is not None:
            assert isinstance(self.embedding, nn.Embedding)
            self.embedding = VocabularyEmbedding(self.embedding, ids, exchange)
        for block in self.layers.values():
            _dress_block(block, config, split, exchange)
        group = exchange.group
        self._shared_vocabulary = SharedVocabulary(
            ids.start,
            -(-config.vocab_size // split.tp),
            group.group_rank,
            group.group_size,
            lambda of_ranks: all_gather_(of_ranks.view(-1), group),
        )
        if self.head is not None:
            self.head = _narrow(self.head, out_features=len(ids))
            self._tie()

    def logits(self, x_BTh: torch.Tensor) -> torch.Tensor:
        """This rank's token ids of the logits: (B, T, V/tp)."""
        assert self.norm is not None and self.head is not None
        (logits_BTV,) = entered(self.norm(x_BTh), [self.head], self._exchange)
        return logits_BTV

    def loss(self, x_BTh: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        assert self.norm is not None and self.head is not None
        x_BTh = _Enter.apply(self.norm(x_BTh), self._exchange)
        return head_loss(x_BTh.flatten(0, 1), self.head.weight, labels_BT.flatten(), self._shared_vocabulary)


def _dress_block(block: nn.Module, config: ModelConfig, split: TensorSplit, exchange: Exchange) -> None:
    assert isinstance(block, Block | ParallelBlock)
    _dress_attention(block.attention, config, split)
    ffn, size = block.ffn, config.ffn_size // split.tp
    for name in ffn.reads:
        setattr(ffn, name, _narrow(getattr(ffn, name), out_features=size))
    setattr(ffn, ffn.writes, _narrow(getattr(ffn, ffn.writes), in_features=size))
    block.branches = partial(shared_parts, exchange)


def _dress_attention(attention: Attention, config: ModelConfig, split: TensorSplit) -> None:
    heads, kv_heads = split.heads(config), split.kv_heads(config)
    attention.num_heads, attention.kv_heads = len(heads), len(kv_heads)
    attention.kv_of_head = split.kv_of_head(config)
    attention.q = _narrow(attention.q, out_features=len(heads) * config.head_size)
    attention.k = _narrow(attention.k, out_features=len(kv_heads) * config.head_size)
    attention.v = _narrow(attention.v, out_features=len(kv_heads) * config.head_size)
    attention.out = _narrow(attention.out, in_features=len(heads) * config.head_size)


def _narrow(plain: nn.Linear, *, in_features: int | None = None, out_features: int | None = None) -> nn.Linear:
    """A linear like `plain` with fewer features on one side; its parameters are left unset."""
    return nn.Linear(
        in_features or plain.in_features,
        out_features or plain.out_features,
        bias=plain.bias is not None,
        device=plain.weight.device,
        dtype=plain.weight.dtype,
    )

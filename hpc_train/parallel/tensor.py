"""Tensor and sequence parallel: dress a plain model so that a tp group computes it together.

A serial block is entered and left once by attention and once by the feed-forward part, a parallel block once in all.
Inside, every rank has its share of the heads or features; outside, all have the whole residual stream, or with sequence
parallel a share of its tokens.

entering: x as it is, gradients summed          | with sequence parallel: all-gather, gradients reduce-scattered
leaving:  partial sums added, gradient as it is | with sequence parallel: reduce-scatter, gradient all-gathered

Source: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing activation recomputation in large
transformer models", MLSys'23.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpc_train.comm.collectives import Group, all_gather_, all_gather_tokens, all_reduce_, reduce_scatter_tokens
from hpc_train.config import ModelConfig
from hpc_train.models.attention import AttentionPlan
from hpc_train.models.transformer import Attention, Block, ParallelBlock, Transformer
from hpc_train.parallel.split_backward import QueuedWeight, linear
from hpc_train.plan.parameters import TensorSplit


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTh: torch.Tensor, group: Group, by_tokens: bool) -> torch.Tensor:
        ctx.group, ctx.by_tokens = group, by_tokens
        return all_gather_tokens(x_BTh, group) if by_tokens else x_BTh.view_as(x_BTh)

    @staticmethod
    def backward(ctx: Any, gradient_BTh: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.by_tokens:
            return reduce_scatter_tokens(gradient_BTh, ctx.group), None, None
        return all_reduce_(gradient_BTh.contiguous(), ctx.group), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_BTh: torch.Tensor, group: Group, by_tokens: bool) -> torch.Tensor:
        ctx.group, ctx.by_tokens = group, by_tokens
        if by_tokens:
            return reduce_scatter_tokens(partial_BTh, group)
        ctx.mark_dirty(partial_BTh)
        return all_reduce_(partial_BTh, group)

    @staticmethod
    def backward(ctx: Any, gradient_BTh: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather_tokens(gradient_BTh, ctx.group) if ctx.by_tokens else gradient_BTh, None, None


class RowLinear(nn.Module):
    """A linear whose input features are split: partial sums are added over the group, the bias once, behind.

    is_joined: it gives its partial sum alone; a parallel block adds another's to it before both leave.
    """

    def __init__(self, plain: nn.Linear, in_features: int, group: Group, by_tokens: bool) -> None:
        super().__init__()
        self.is_joined = False
        self.weight = _parameter(plain.weight, (plain.out_features, in_features))
        self.bias = None if plain.bias is None else _parameter(plain.bias, (plain.out_features,))
        self._group, self._by_tokens = group, by_tokens
        self.queued: QueuedWeight | None = None

    def forward(self, x_BTf: torch.Tensor) -> torch.Tensor:
        partial_BTh = linear(x_BTf, self.weight, None, self.queued)
        if self.is_joined:
            return partial_BTh
        y_BTh = _Leave.apply(partial_BTh, self._group, self._by_tokens)
        return y_BTh if self.bias is None else y_BTh.add_(self.bias)


class SharedParallelBlock(ParallelBlock):
    """A parallel block that a group computes together: one exchange before both parts, one of their sum behind."""

    def __init__(self, plain: ParallelBlock, group: Group, by_tokens: bool) -> None:
        nn.Module.__init__(self)
        self.layer, self.norm, self.attention, self.ffn = plain.layer, plain.norm, plain.attention, plain.ffn
        self._group, self._by_tokens = group, by_tokens
        for row in self._rows():
            row.is_joined = True

    def branches(
        self, x_BTh: torch.Tensor, plan: AttentionPlan, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        x_BTh = _Enter.apply(x_BTh, self._group, self._by_tokens)
        y_BTh = _Leave.apply(super().branches(x_BTh, plan, rotary), self._group, self._by_tokens)
        for row in self._rows():
            y_BTh = y_BTh if row.bias is None else y_BTh.add_(row.bias)
        return y_BTh

    def _rows(self) -> tuple[RowLinear, RowLinear]:
        out, down = self.attention.out, self.ffn.down
        assert isinstance(out, RowLinear) and isinstance(down, RowLinear)
        return out, down


class VocabularyEmbedding(nn.Module):
    """An embedding whose rows are split: each rank looks up its own token ids, and the results are added."""

    def __init__(self, plain: nn.Embedding, ids: range, group: Group, by_tokens: bool) -> None:
        super().__init__()
        self.weight = _parameter(plain.weight, (len(ids), plain.embedding_dim))
        self._ids, self._group, self._by_tokens = ids, group, by_tokens

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        local_BT = tokens_BT - self._ids.start
        foreign_BT = (local_BT < 0) | (local_BT >= len(self._ids))
        x_BTh = F.embedding(local_BT.masked_fill_(foreign_BT, 0), self.weight)
        return _Leave.apply(x_BTh.masked_fill_(foreign_BT[..., None], 0.0), self._group, self._by_tokens)


class _VocabularyLoss(torch.autograd.Function):
    """Cross entropy summed over the supervised tokens, with the logits of a token spread over the group.

    Each rank takes the softmax over its own ids; one exchange of two numbers a token then gives the whole one's, of
    which this rank has a share. logits_NV: this rank's ids, fp32 or better. labels_N: global ids, -100 where there is
    none.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor, first_id: int, group: Group) -> torch.Tensor:
        local_N = labels_N - first_id
        is_here_N = (local_N >= 0) & (local_N < logits_NV.shape[1])
        index_N = local_N.masked_fill(~is_here_N, 0)
        p_NV = logits_NV.softmax(dim=1)
        of_ranks_n2N = logits_NV.new_empty(group.group_size, 2, len(labels_N))
        log_sum_N, picked_N = of_ranks_n2N[group.group_rank]
        # The largest probability is that of the largest logit, exp(0) / sum.
        torch.sub(logits_NV.amax(dim=1), p_NV.amax(dim=1).log_(), out=log_sum_N)
        picked_N.copy_(logits_NV.gather(1, index_N[:, None])[:, 0]).masked_fill_(~is_here_N, 0.0)
        all_gather_(of_ranks_n2N.view(-1), group)
        whole_N = of_ranks_n2N[:, 0].logsumexp(dim=0)
        supervised_N = labels_N != -100
        ctx.save_for_backward(p_NV, (log_sum_N - whole_N).exp_() * supervised_N, index_N, is_here_N & supervised_N)
        return (whole_N - of_ranks_n2N[:, 1].sum(dim=0)).masked_fill_(~supervised_N, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        p_NV, share_N, index_N, is_here_N = ctx.saved_tensors
        gradient_NV = p_NV.mul_((share_N * gradient)[:, None])  # in place: nobody else has it
        gradient_NV.scatter_add_(1, index_N[:, None], (is_here_N * -gradient)[:, None])
        return gradient_NV, None, None, None


class TensorParallelTransformer(Transformer):
    """A Transformer, or a part of one, of which this rank computes its share."""

    def __init__(self, config: ModelConfig, max_seq_len: int, split: TensorSplit, group: Group, **part: Any) -> None:
        super().__init__(config, max_seq_len, **part)
        self._split, self._group = split, group
        by_tokens = split.sequence_parallel
        if by_tokens:
            self.stream_part = (split.tp_rank, split.tp)
        ids = split.vocabulary(config)
        if self.embedding is not None:
            assert isinstance(self.embedding, nn.Embedding)
            self.embedding = VocabularyEmbedding(self.embedding, ids, group, by_tokens)
        for name, block in self.layers.items():
            self.layers[name] = _dressed_block(block, config, split, group)
        if self.head is not None:
            self.head = _narrow(self.head, len(ids))
            self._tie()

    def logits(self, x_BTh: torch.Tensor) -> torch.Tensor:
        """This rank's token ids of the logits: (B, T, V/tp)."""
        assert self.norm is not None and self.head is not None
        return self.head(_Enter.apply(self.norm(x_BTh), self._group, self._split.sequence_parallel))

    def loss(self, x_BTh: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        logits_NV = self.logits(x_BTh).flatten(0, 1)
        logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        first_id = self._split.vocabulary(self.config).start
        return _VocabularyLoss.apply(logits_NV, labels_BT.flatten(), first_id, self._group)


def _dressed_block(block: nn.Module, config: ModelConfig, split: TensorSplit, group: Group) -> nn.Module:
    assert isinstance(block, Block | ParallelBlock)
    by_tokens = split.sequence_parallel
    _dress_attention(block.attention, config, split, group)
    ffn: Any = block.ffn
    size = config.ffn_size // split.tp
    for name in ("gate", "up"):
        if hasattr(ffn, name):
            setattr(ffn, name, _narrow(getattr(ffn, name), size))
    ffn.down = RowLinear(ffn.down, size, group, by_tokens)
    if isinstance(block, ParallelBlock):
        return SharedParallelBlock(block, group, by_tokens)

    def enter(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_Enter.apply(arguments[0], group, by_tokens), *arguments[1:])

    for module in (block.attention, ffn):
        module.register_forward_pre_hook(enter)
    return block


def _dress_attention(attention: Attention, config: ModelConfig, split: TensorSplit, group: Group) -> None:
    heads, kv_heads = split.heads(config), split.kv_heads(config)
    per_kv = config.num_heads // config.kv_heads
    attention.num_heads, attention.kv_heads = len(heads), len(kv_heads)
    kv_of_head = tuple(head // per_kv - kv_heads.start for head in heads)
    if kv_of_head != tuple(index * len(kv_heads) // len(heads) for index in range(len(heads))):
        attention.kv_of_head = kv_of_head
    attention.q = _narrow(attention.q, len(heads) * config.head_size)
    attention.k = _narrow(attention.k, len(kv_heads) * config.head_size)
    attention.v = _narrow(attention.v, len(kv_heads) * config.head_size)
    assert isinstance(attention.out, nn.Linear)
    attention.out = RowLinear(attention.out, len(heads) * config.head_size, group, split.sequence_parallel)


def _narrow(plain: nn.Linear, out_features: int) -> nn.Linear:
    """A linear like `plain` with fewer output features; its parameters are left unset."""
    return nn.Linear(
        plain.in_features,
        out_features,
        bias=plain.bias is not None,
        device=plain.weight.device,
        dtype=plain.weight.dtype,
    )


def _parameter(like: torch.Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(like.new_empty(shape))

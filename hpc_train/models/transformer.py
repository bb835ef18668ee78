"""One plain decoder-only transformer for the gpt and the llama family. It knows nothing of ranks.

Shapes: B sequences, T tokens a sequence, h hidden size, H query heads, K key/value heads, D head size, V vocabulary.
Parameter names are the global names of checkpoints: layers by index, q, k, v, gate and up apart.
"""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpc_train.config import ModelConfig
from hpc_train.models.attention import AttentionCore
from hpc_train.models.dropout import DropoutKey, drop
from hpc_train.models.loss import head_loss
from hpc_train.models.saving import LayerSaving


@dataclass(frozen=True)
class Inputs:
    """A micro-batch as a model reads it.

    tokens_BT, labels_BT (-100: not supervised), positions_BT (a token's place in its document): (B, T) int64. dropout:
    None where nothing is dropped. saving: None where what layers save stays where it is.
    """

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    plan: AttentionCore
    dropout: DropoutKey | None = None
    saving: LayerSaving | None = None


class Part(nn.Module, ABC):
    """A part of a block: linears that all read its input, what lies within, and a linear that writes its output.

    reads, writes: the linears' names.
    """

    reads: tuple[str, ...]
    writes: str

    @abstractmethod
    def inner(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """What the writing linear reads, from what the reading ones gave, in their order, and the context."""

    def forward(self, x_BTh: torch.Tensor, *context: Any) -> torch.Tensor:
        products = [getattr(self, name)(x_BTh) for name in self.reads]
        return getattr(self, self.writes)(self.inner(*products, *context))


Branches = Callable[[torch.Tensor, Sequence[tuple[Part, tuple[Any, ...]]]], torch.Tensor]
"""The sum of what parts make of the same input, each in its context."""


def sum_of_parts(x_BTh: torch.Tensor, parts: Sequence[tuple[Part, tuple[Any, ...]]]) -> torch.Tensor:
    """Each part by itself."""
    return functools.reduce(torch.add, [part(x_BTh, *context) for part, context in parts])


class Attention(Part):
    """Multi-head attention with grouped key/value heads; RoPE where `rotary` is given.

    kv_of_head: for each query head its key/value head, where they are not in equal groups in order. window: how many
    tokens a query sees, itself the last of them; None for all.
    """

    reads, writes = ("q", "k", "v"), "out"

    def __init__(self, config: ModelConfig, window: int | None) -> None:
        super().__init__()
        bias = config.family == "gpt"
        kv_size = config.kv_heads * config.head_size
        self.num_heads, self.kv_heads, self.head_size = config.num_heads, config.kv_heads, config.head_size
        self.window = window
        self.kv_of_head: tuple[int, ...] | None = None
        self.recompute_core = False
        self.q = nn.Linear(config.hidden_size, config.hidden_size, bias=bias)
        self.k = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.v = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=bias)

    def inner(
        self,
        q_BTf: torch.Tensor,
        k_BTf: torch.Tensor,
        v_BTf: torch.Tensor,
        plan: AttentionCore,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        B, T, _ = q_BTf.shape
        q_BHTD = q_BTf.view(B, T, self.num_heads, self.head_size).transpose(1, 2)
        k_BKTD = k_BTf.view(B, T, self.kv_heads, self.head_size).transpose(1, 2)
        v_BKTD = v_BTf.view(B, T, self.kv_heads, self.head_size).transpose(1, 2)
        y_BHTD = _maybe_recomputed(self.recompute_core, self._core, q_BHTD, k_BKTD, v_BKTD, plan, rotary)
        return y_BHTD.transpose(1, 2).reshape(B, T, -1)

    def _core(
        self,
        q_BHTD: torch.Tensor,
        k_BKTD: torch.Tensor,
        v_BKTD: torch.Tensor,
        plan: AttentionCore,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        if rotary is not None:
            q_BHTD, k_BKTD = _rotate(q_BHTD, *rotary), _rotate(k_BKTD, *rotary)
        if self.kv_of_head is not None:
            k_BKTD, v_BKTD = k_BKTD[:, list(self.kv_of_head)], v_BKTD[:, list(self.kv_of_head)]
        return plan.attend(q_BHTD, k_BKTD, v_BKTD, self.window)


class GptFeedForward(Part):
    """Two linears with a GELU between them."""

    reads, writes = ("up",), "down"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.recompute_core = False
        self.up = nn.Linear(config.hidden_size, config.ffn_size)
        self.down = nn.Linear(config.ffn_size, config.hidden_size)

    def inner(self, up_BTf: torch.Tensor) -> torch.Tensor:
        return _maybe_recomputed(self.recompute_core, _gelu, up_BTf)


class LlamaFeedForward(Part):
    """SwiGLU: a gated linear unit with SiLU."""

    reads, writes = ("gate", "up"), "down"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.recompute_core = False
        self.gate = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.down = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def inner(self, gate_BTf: torch.Tensor, up_BTf: torch.Tensor) -> torch.Tensor:
        return _maybe_recomputed(self.recompute_core, _swiglu, gate_BTf, up_BTf)


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); what is added may be dropped out.

    branches: what computes attention and feed-forward part.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.branches: Branches = sum_of_parts
        self.attention_norm = _norm(config)
        self.attention = Attention(config, config.windows[layer])
        self.ffn_norm = _norm(config)
        self.ffn = _feed_forward(config)

    def forward(
        self,
        x_BTh: torch.Tensor,
        plan: AttentionCore,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        dropout: DropoutKey | None = None,
        first_token: int = 0,
    ) -> torch.Tensor:
        """first_token: the place in its sequence of the first token of x."""
        y_BTh = self.branches(self.attention_norm(x_BTh), [(self.attention, (plan, rotary))])
        x_BTh = x_BTh + drop(y_BTh, dropout, layer=self.layer, site=0, first_token=first_token)
        y_BTh = self.branches(self.ffn_norm(x_BTh), [(self.ffn, ())])
        return x_BTh + drop(y_BTh, dropout, layer=self.layer, site=1, first_token=first_token)


class ParallelBlock(nn.Module):
    """x + (attention(norm(x)) + ffn(norm(x))), of one norm; what is added may be dropped out.

    branches: what computes both parts and adds them.

    Source: Wang and Komatsuzaki, "GPT-J-6B", 2021; Chowdhery et al., "PaLM", 2022.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.branches: Branches = sum_of_parts
        self.norm = _norm(config)
        self.attention = Attention(config, config.windows[layer])
        self.ffn = _feed_forward(config)

    def forward(
        self,
        x_BTh: torch.Tensor,
        plan: AttentionCore,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        dropout: DropoutKey | None = None,
        first_token: int = 0,
    ) -> torch.Tensor:
        """first_token: the place in its sequence of the first token of x."""
        y_BTh = self.branches(self.norm(x_BTh), [(self.attention, (plan, rotary)), (self.ffn, ())])
        return x_BTh + drop(y_BTh, dropout, layer=self.layer, site=0, first_token=first_token)


BLOCKS: dict[str, type[Block] | type[ParallelBlock]] = {"serial": Block, "parallel": ParallelBlock}


class Transformer(nn.Module):
    """Token ids to the summed loss of the supervised tokens, or to logits; or one part of the way.

    A part has some of the layers, under their numbers in the whole, and perhaps the embedding or the head. Between
    parts the residual stream travels: (B, T, h), or a share of the tokens where `stream_part` says so.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_seq_len: int,
        *,
        layers: range | None = None,
        has_embedding: bool = True,
        has_head: bool = True,
    ) -> None:
        """Parameters are left unset; call `init_weights`.

        max_seq_len: the longest sequence; sets the table of learned positions (gpt). layers: None for all.
        """
        super().__init__()
        self.config = config
        self.recompute_blocks = False
        self.stream_part = (0, 1)  # which of how many equal shares of each sequence the residual stream holds
        self.embedding: nn.Module | None = None
        if has_embedding:
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        has_positions = has_embedding and config.family == "gpt"
        self.positions = nn.Embedding(max_seq_len, config.hidden_size) if has_positions else None
        numbers = range(config.num_layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(number): BLOCKS[config.block](config, number) for number in numbers})
        self.norm = _norm(config) if has_head else None
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if has_head else None
        self._tie()

    def _tie(self) -> None:
        if self.config.tied_embeddings and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight  # type: ignore[assignment]

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set all weights, each as a function of the seed and its name.

        To call from Python for a whole model; `parallel.apply` sets a rank's own parts, to the same values.
        """
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_values(self.config, name, tuple(parameter.shape), seed, parameter.device))

    def forward(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor, plan: AttentionCore) -> torch.Tensor:
        """Logits of a whole model: (B, T, V), in the parameters' type. positions_BT: places in the document."""
        inputs = Inputs(tokens_BT, tokens_BT, positions_BT, plan)
        return self.logits(self.hidden(None, inputs))

    def loss_sum(
        self,
        tokens_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        plan: AttentionCore,
    ) -> torch.Tensor:
        """The loss of a whole model; see `loss`."""
        inputs = Inputs(tokens_BT, labels_BT, positions_BT, plan)
        return self.loss(self.hidden(None, inputs), labels_BT)

    def hidden(self, x_BTh: torch.Tensor | None, inputs: Inputs) -> torch.Tensor:
        """The residual stream behind this part's layers; x_BTh is None where the embedding is this part's."""
        share, num_shares = self.stream_part
        first_token = share * (inputs.tokens_BT.shape[1] // num_shares)
        if self.embedding is not None:
            x_BTh = self._embed(inputs, first_token)
        assert x_BTh is not None
        rotary = self._rotary(inputs.positions_BT, x_BTh.dtype) if self.config.family == "llama" else None
        for index, layer in enumerate(self.layers.values()):
            with _saving(inputs, index, len(self.layers), rotary):
                x_BTh = _maybe_recomputed(
                    self.recompute_blocks, layer, x_BTh, inputs.plan, rotary, inputs.dropout, first_token
                )
        return x_BTh

    def logits(self, x_BTh: torch.Tensor) -> torch.Tensor:
        assert self.norm is not None and self.head is not None
        return self.head(self.norm(x_BTh))

    def loss(self, x_BTh: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """Cross entropy summed over supervised tokens (label not -100), scalar of fp32 or better, in nats.

        Without any supervised token it is an exact zero that still reaches every parameter.
        """
        assert self.norm is not None and self.head is not None
        return head_loss(self.norm(x_BTh).flatten(0, 1), self.head.weight, labels_BT.flatten())

    def _embed(self, inputs: Inputs, first_token: int) -> torch.Tensor:
        assert self.embedding is not None
        x_BTh = self.embedding(inputs.tokens_BT)
        if self.positions is not None:
            x_BTh = x_BTh + self.positions(inputs.positions_BT[:, first_token : first_token + x_BTh.shape[1]])
        return drop(x_BTh, inputs.dropout, layer=-1, site=0, first_token=first_token)

    def _rotary(self, positions_BT: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies_F = _rope_frequencies(self.config, positions_BT.device)
        angles_BTF = positions_BT[..., None].float() * frequencies_F
        angles_B1TD = torch.cat([angles_BTF, angles_BTF], dim=-1)[:, None]
        return angles_B1TD.cos().to(dtype), angles_B1TD.sin().to(dtype)


def initial_values(
    config: ModelConfig, name: str, shape: tuple[int, ...], seed: int, device: torch.device
) -> torch.Tensor:
    """The whole parameter `name` as training begins, in fp32: the same whichever rank or mesh asks.

    Linears and embeddings are normal with `init_std`; those that write to the residual stream are narrower by
    sqrt(2 * layers), as GPT-2 does. Norms start at one, biases at zero.
    """
    if len(shape) < 2:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device=device)
    is_residual = name.endswith(("attention.out.weight", "ffn.down.weight"))
    std = config.init_std / (2 * config.num_layers) ** 0.5 if is_residual else config.init_std
    digest = hashlib.sha256(f"{seed},{name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _maybe_recomputed(is_recomputed: bool, function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Call a function; if so asked and gradients are wanted, keep only its inputs and call it again in the backward."""
    if not is_recomputed or not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _saving(
    inputs: Inputs, index: int, count: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
) -> AbstractContextManager[None]:
    """Where a layer's forward is called."""
    if inputs.saving is None or not torch.is_grad_enabled():
        return nullcontext()
    return inputs.saving.layer(index, count, (inputs.positions_BT, *(rotary or ())))


def _feed_forward(config: ModelConfig) -> Part:
    return GptFeedForward(config) if config.family == "gpt" else LlamaFeedForward(config)


def _norm(config: ModelConfig) -> nn.Module:
    if config.family == "gpt":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
    return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


def _rope_frequencies(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """(D/2,): Su et al., "RoFormer", 2021."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32, device=device) / config.head_size
    return config.rope_theta**-exponents


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of the last dimension, the layout of Hugging Face's Llama weights."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin

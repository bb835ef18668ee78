"""One plain decoder-only transformer for the gpt and the llama family. It knows nothing of ranks.

Shapes: B sequences, T tokens a sequence, h hidden size, H query heads, K key/value heads, D head size, V vocabulary.
Parameter names are the global names of checkpoints: layers by index, q, k, v, gate and up apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from hpc_train.config import ModelConfig


@dataclass(frozen=True)
class AttentionPlan:
    """Which tokens see which, for one micro-batch: causal, and within a document only.

    mask_B1TT: (B, 1, T, T) bool, True where a query (dim 2) sees a key (dim 3); None when every sequence is one
    document, where plain causal attention does.
    """

    mask_B1TT: torch.Tensor | None

    @classmethod
    def from_boundaries(
        cls, boundaries: tuple[tuple[int, ...], ...], seq_len: int, device: torch.device
    ) -> AttentionPlan:
        """From the lengths of the documents' pieces in each sequence; lengths add up to seq_len."""
        if all(len(lengths) == 1 for lengths in boundaries):
            return cls(None)
        document_BT = torch.stack(
            [torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) for lengths in boundaries]
        ).to(device)
        same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
        causal_TT = torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).tril()
        return cls((same_BTT & causal_TT)[:, None])


class Attention(nn.Module):
    """Multi-head attention with grouped key/value heads; RoPE where `rotary` is given."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = config.family == "gpt"
        kv_size = config.kv_heads * config.head_size
        self.num_heads, self.kv_heads, self.head_size = config.num_heads, config.kv_heads, config.head_size
        self.q = nn.Linear(config.hidden_size, config.hidden_size, bias=bias)
        self.k = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.v = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=bias)

    def forward(
        self, x_BTh: torch.Tensor, plan: AttentionPlan, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        B, T, _ = x_BTh.shape
        q_BHTD = self.q(x_BTh).view(B, T, self.num_heads, self.head_size).transpose(1, 2)
        k_BKTD = self.k(x_BTh).view(B, T, self.kv_heads, self.head_size).transpose(1, 2)
        v_BKTD = self.v(x_BTh).view(B, T, self.kv_heads, self.head_size).transpose(1, 2)
        if rotary is not None:
            q_BHTD, k_BKTD = _rotate(q_BHTD, *rotary), _rotate(k_BKTD, *rotary)
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD,
            k_BKTD,
            v_BKTD,
            attn_mask=plan.mask_B1TT,
            is_causal=plan.mask_B1TT is None,
            enable_gqa=self.kv_heads != self.num_heads,
        )
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, -1))


class GptFeedForward(nn.Module):
    """Two linears with a GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.ffn_size)
        self.down = nn.Linear(config.ffn_size, config.hidden_size)

    def forward(self, x_BTh: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x_BTh), approximate="tanh"))


class LlamaFeedForward(nn.Module):
    """SwiGLU: a gated linear unit with SiLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.down = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, x_BTh: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x_BTh)) * self.up(x_BTh))


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.ffn_norm = _norm(config)
        self.ffn: nn.Module = GptFeedForward(config) if config.family == "gpt" else LlamaFeedForward(config)

    def forward(
        self, x_BTh: torch.Tensor, plan: AttentionPlan, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        x_BTh = x_BTh + self.attention(self.attention_norm(x_BTh), plan, rotary)
        return x_BTh + self.ffn(self.ffn_norm(x_BTh))


class Transformer(nn.Module):
    """Token ids to the summed loss of the supervised tokens, or to logits."""

    def __init__(self, config: ModelConfig, max_seq_len: int) -> None:
        """Parameters are left unset; call `init_weights`.

        max_seq_len: the longest sequence; sets the table of learned positions (gpt).
        """
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(max_seq_len, config.hidden_size) if config.family == "gpt" else None
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        self._rope_frequencies: torch.Tensor
        if config.family == "llama":
            self.register_buffer("_rope_frequencies", _rope_frequencies(config), persistent=False)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw all weights from one generator, in the order of the names: the same on every rank and mesh.

        Linears and embeddings are normal with `init_std`; those that write to the residual stream are narrower by
        sqrt(2 * layers), as GPT-2 does. Norms start at one, biases at zero.
        """
        generator = torch.Generator(device=self.embedding.weight.device).manual_seed(seed)
        residual_std = self.config.init_std / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                is_residual = name.endswith(("attention.out.weight", "ffn.down.weight"))
                std = residual_std if is_residual else self.config.init_std
                parameter.normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.fill_(1.0)

    def forward(self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Logits: (B, T, V), in the parameters' type. positions_BT: a token's place in its document."""
        x_BTh = self.embedding(tokens_BT)
        rotary = None
        if self.positions is not None:
            x_BTh = x_BTh + self.positions(positions_BT)
        else:
            rotary = self._rotary(positions_BT, x_BTh.dtype)
        for layer in self.layers:
            x_BTh = layer(x_BTh, plan, rotary)
        return self.head(self.norm(x_BTh))

    def loss_sum(
        self,
        tokens_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Cross entropy summed over supervised tokens (label not -100), fp32 scalar, in nats.

        Without any supervised token it is an exact zero that still reaches every parameter.
        """
        logits_BTV = self(tokens_BT, positions_BT, plan)
        return F.cross_entropy(
            logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=-100, reduction="sum"
        )

    def _rotary(self, positions_BT: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        angles_BTF = positions_BT[..., None].float() * self._rope_frequencies
        angles_B1TD = torch.cat([angles_BTF, angles_BTF], dim=-1)[:, None]
        return angles_B1TD.cos().to(dtype), angles_B1TD.sin().to(dtype)


def _norm(config: ModelConfig) -> nn.Module:
    if config.family == "gpt":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
    return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


def _rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """(D/2,): Su et al., "RoFormer", 2021."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    return config.rope_theta**-exponents


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of the last dimension, the layout of Hugging Face's Llama weights."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin

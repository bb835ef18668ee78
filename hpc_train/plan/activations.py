"""What a forward keeps for its backward, in bytes for one micro-batch on one rank: term by term as the model does it.

Each term is a tensor that an operation of models/transformer.py (or parallel/tensor.py) saves; a tensor that two
operations save is counted once. Letters: N tokens of a micro-batch; S those of the residual stream here, N / tp with
sequence parallel; h hidden size; q and k the widths of this rank's query and key/value heads; f its share of the
feed-forward size; V its share of the vocabulary; a bytes of an activation; T tokens of a sequence.

| in a block | bytes | kept by |
|---|---|---|
| LayerNorm (gpt), twice | S h a + 2 S | the norm: its input, and two numbers a token |
| RMSNorm (llama), twice, one kernel (CUDA) | S h a + 4 S | the norm: its input, and one number a token |
| RMSNorm (llama), twice, step by step (CPU) | 8 S h + 4 S | its input and its product, both in fp32 |
| normed stream, twice | N h a | q, k, v and up (gate), one tensor for all |
| queries, keys, values | N (q + 2 k) a | attention; keys and values q wide where heads are shared unevenly |
| where heads are shared unevenly | 16 heads | the copies of keys and of values: each query head's number, int64 |
| attention's sums | 4 N heads | attention, fp32 |
| mask as numbers | N T a | attention, where sequences hold several documents; one for each block |
| attention's output | N q a | the output linear |
| gpt: before and behind the GELU | 2 N f a | GELU, down |
| llama: gate, silu(gate), up, product | 4 N f a | the products, down |
| dropout, twice | S h | one byte for each element that may be dropped |
| behind the blocks: the loss | N h a + 4 V h | its gradients by the head's input and weight |

A parallel block has one norm, one normed stream and one dropout. A layer with a window shorter than the sequence cuts
it into tiles of t queries that see s keys each: attention then keeps the queries of all tiles, their keys and values
(s / t as many as there are), a mask of t s a for each tile, its sums and its output by tiles; and where the last tile
of a sequence is not full and others follow, the output linear keeps the output once more.

Selective recomputation leaves out attention's sums, the mask, the copies of shared heads and silu(gate). Full
recomputation keeps S h a a block, and the rest of one block at a time during the backward. RoPE's tables, 2 N D a, are
kept once for all blocks of a stage.

Checked on the CPU against hooks on saved tensors. On CUDA the terms are derived from torch's sources: one kernel for
attention and for each norm is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hpc_train.config import Config
from hpc_train.plan.axis_bytes import ELEMENT_BYTES, is_split_by_tokens
from hpc_train.plan.cost import micro_batch_shape
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.parameters import ModelPart, TensorSplit

Device = Literal["cpu", "cuda"]
SMALLEST_TILE = 64
"""Queries of a windowed layer's smallest tile, as in models/attention.py; a test of the bytes holds it against that."""
LOGITS_BYTES: dict[Device, int] = {"cpu": 2**22, "cuda": 2**29}
"""Of a chunk of tokens in fp32, as in models/loss.py, with a test alike."""


@dataclass(frozen=True)
class Shape:
    """The letters of the table above for one rank; is_masked: sequences hold several documents."""

    num_tokens: int
    stream_tokens: int
    hidden: int
    query_width: int
    kv_width: int
    num_heads: int
    ffn: int
    vocabulary: int
    element_bytes: int
    seq_len: int
    is_masked: bool

    @property
    def stream_bytes(self) -> int:
        """The residual stream of one micro-batch, as this rank holds it and sends it."""
        return self.stream_tokens * self.hidden * self.element_bytes


def shape_of(config: Config, mesh: Mesh, split: TensorSplit, is_masked: bool) -> Shape:
    """A rank's sizes of one micro-batch."""
    model = config.model
    num_sequences, seq_len = micro_batch_shape(config)
    num_tokens = num_sequences * seq_len // mesh.cp
    heads = split.heads(model)
    return Shape(
        num_tokens=num_tokens,
        stream_tokens=num_tokens // (mesh.tp if is_split_by_tokens(config, mesh) else 1),
        hidden=model.hidden_size,
        query_width=len(heads) * model.head_size,
        kv_width=len(split.kv_heads(model)) * model.head_size,
        num_heads=len(heads),
        ffn=model.ffn_size // split.tp,
        vocabulary=len(split.vocabulary(model)),
        element_bytes=ELEMENT_BYTES[config.train.precision],
        seq_len=seq_len,
        # Attention on rings knows documents by their borders, without masks.
        is_masked=is_masked and config.parallel.hdp is None,
    )


@dataclass(frozen=True)
class Tiles:
    """How a layer with a window cuts each sequence: the cut of models/attention.py."""

    count: int
    num_queries: int
    num_keys: int

    @classmethod
    def of(cls, seq_len: int, window: int | None) -> Tiles | None:
        """None where a query sees all keys before it."""
        if window is None or window >= seq_len:
            return None
        count = -(-seq_len // min(max(SMALLEST_TILE, window // 2), seq_len))
        num_queries = -(-seq_len // count)
        return cls(count, num_queries, num_queries + window - 1)


def saved_bytes(config: Config, part: ModelPart, split: TensorSplit, shape: Shape, device: Device) -> int:
    """What one micro-batch's forward through a stage keeps until its backward."""
    if config.train.recompute == "full":
        saved = len(part.layers) * shape.stream_bytes
    else:
        saved = sum(block_bytes(config, split, shape, device, layer) for layer in part.layers)
    if config.model.family == "llama":
        saved += 2 * shape.num_tokens * config.model.head_size * shape.element_bytes
    if part.has_embedding:
        saved += _embedding_bytes(config, split, shape)
    return saved + (head_bytes(config, shape, device) if part.has_head else 0)


def head_bytes(config: Config, shape: Shape, device: Device) -> int:
    """Of the last norm, and the gradients that the loss makes with itself: of its input, and of the head's weight in
    fp32. They are gone when the backward comes to the blocks.
    """
    gradients = shape.num_tokens * shape.hidden * shape.element_bytes + 4 * shape.vocabulary * shape.hidden
    return _norm_bytes(config, shape, device) + gradients


def block_bytes(config: Config, split: TensorSplit, shape: Shape, device: Device, layer: int) -> int:
    """What a block keeps without recomputation, or with the selective one if the configuration says so."""
    model, selective = config.model, config.train.recompute == "selective"
    N, a = shape.num_tokens, shape.element_bytes
    times = 1 if model.block == "parallel" else 2
    saved = times * (_norm_bytes(config, shape, device) + N * shape.hidden * a)
    if selective:
        saved += N * (2 * shape.query_width + 2 * shape.kv_width) * a
    else:
        is_uneven = has_uneven_heads(config, split)
        kv_width = shape.query_width if is_uneven else shape.kv_width
        saved += _attention_bytes(shape, kv_width, Tiles.of(shape.seq_len, model.windows[layer]))
        saved += 2 * 8 * shape.num_heads if is_uneven else 0
    if model.family == "gpt":
        saved += 2 * N * shape.ffn * a
    else:
        saved += (3 if selective else 4) * N * shape.ffn * a
    return saved + (times * shape.stream_tokens * shape.hidden if model.dropout else 0)


def queued_bytes(config: Config, part: ModelPart, shape: Shape) -> int:
    """What one micro-batch's backward leaves in a zero-bubble schedule until its W: each linear's input and its
    output's gradient. One input for q, k and v, and one for gate and up; in a parallel block they are the same. Where
    the two outputs enter the stream their gradients are one tensor, unless dropped out apart.
    """
    model, N = config.model, shape.num_tokens
    is_parallel = model.block == "parallel"
    wide = (2 if model.family == "gpt" else 3) * shape.ffn + 2 * shape.query_width + 2 * shape.kv_width
    inputs = shape.hidden * (1 if is_parallel else 2)
    outputs = shape.hidden * (1 if is_parallel else 2)
    return len(part.layers) * N * (wide + inputs + outputs) * shape.element_bytes


def mask_bytes(config: Config, layers: Iterable[int], shape: Shape) -> int:
    """Masks of one micro-batch, a byte a pair of tokens, made once for all blocks that see as far, and kept."""
    kinds = {Tiles.of(shape.seq_len, config.model.windows[layer]) for layer in layers}
    num_sequences = shape.num_tokens // shape.seq_len
    pairs = [shape.seq_len**2 * shape.is_masked if t is None else t.count * t.num_queries * t.num_keys for t in kinds]
    return num_sequences * sum(pairs)


def logits_bytes(shape: Shape, device: Device) -> int:
    """A chunk's logits in fp32, which become their gradient; where the model computes in less, that once more."""
    num_tokens = min(shape.num_tokens, max(1, LOGITS_BYTES[device] // (4 * shape.vocabulary)))
    narrow = shape.element_bytes if shape.element_bytes < 4 else 0
    return num_tokens * shape.vocabulary * (4 + narrow)


def has_uneven_heads(config: Config, split: TensorSplit) -> bool:
    """Whether this rank's query heads share its key/value heads in another pattern than equal groups in order, so
    that each query head gets a copy of its own.
    """
    heads, kv_heads = split.heads(config.model), split.kv_heads(config.model)
    per_kv = config.model.num_heads // config.model.kv_heads
    return any(
        head // per_kv - kv_heads.start != index * len(kv_heads) // len(heads) for index, head in enumerate(heads)
    )


def _attention_bytes(shape: Shape, kv_width: int, tiles: Tiles | None) -> int:
    """Queries, keys, values, the mask as numbers, sums and output of one layer."""
    N, a = shape.num_tokens, shape.element_bytes
    if tiles is None:
        mask = N * shape.seq_len * a if shape.is_masked else 0
        return N * (2 * shape.query_width + 2 * kv_width) * a + 4 * N * shape.num_heads + mask
    num_tiles = N // shape.seq_len * tiles.count
    queries, keys = num_tiles * tiles.num_queries, num_tiles * tiles.num_keys
    in_tiles = queries * (2 * shape.query_width * a + 4 * shape.num_heads) + keys * 2 * kv_width * a
    # Tiles lie in the order of tokens, so leaving out the padding takes a copy only where another sequence follows it.
    is_copied = queries > N > shape.seq_len
    return in_tiles + queries * tiles.num_keys * a + (N * shape.query_width * a if is_copied else 0)


def _norm_bytes(config: Config, shape: Shape, device: Device) -> int:
    S, h, a = shape.stream_tokens, shape.hidden, shape.element_bytes
    if config.model.family == "gpt":
        return S * h * a + 2 * S * (a if device == "cpu" else 4)
    return 2 * S * h * 4 + S * 4 if device == "cpu" else S * h * a + S * 4


def _embedding_bytes(config: Config, split: TensorSplit, shape: Shape) -> int:
    """Token ids, and which of them are another rank's; positions (gpt); what was dropped."""
    saved = shape.num_tokens * (8 if split.tp == 1 else 8 + 1)
    saved += shape.num_tokens * 8 if config.model.family == "gpt" else 0
    return saved + (shape.stream_tokens * shape.hidden if config.model.dropout else 0)

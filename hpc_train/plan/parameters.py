"""Which part of each parameter a rank of a mesh holds: by pipeline stage and by tensor-parallel place. Pure arithmetic.

Names and shapes are the whole model's; a part is a box of them. Parameters that no split touches, and key/value heads
that several ranks need, are held several times; one copy of each is the one that is counted and stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from hpc_train.config import Config, ModelConfig
from hpc_train.errors import ConfigError
from hpc_train.plan.changes import Change, SizesError, nearest, one_of
from hpc_train.plan.flat import Box


@dataclass(frozen=True)
class ModelPart:
    """What one pipeline stage (or model_chunk) holds."""

    layers: range
    has_embedding: bool
    has_head: bool

    @classmethod
    def whole(cls, config: ModelConfig) -> ModelPart:
        return cls(range(config.num_layers), True, True)


@dataclass(frozen=True)
class LocalParameter:
    """A rank's part of one parameter.

    local_name: its name in the rank's model part, which differs from `name` where a tied head has a copy of its own.
    shape: global. box: this rank's part of it. counted_from: norms count and checkpoints store this copy's elements
    from here on (those before are another rank's to count); None: none of them. tp_sum: what must be done to its
    gradient within the tp group before it is right: nothing; a sum over all (each rank saw a part of the tokens); or a
    sum over the ranks that hold the same key/value head. is_tied: the sum over first and last stage is needed.
    """

    local_name: str
    name: str
    shape: tuple[int, ...]
    box: Box
    counted_from: int | None = 0
    tp_sum: Literal["none", "all", "kv"] = "none"
    is_tied: bool = False


@dataclass(frozen=True)
class TensorSplit:
    """A model's split over the tp axis, seen from one place on it."""

    tp: int
    tp_rank: int
    sequence_parallel: bool

    def heads(self, config: ModelConfig) -> range:
        """The query heads of this place."""
        count = config.num_heads // self.tp
        return range(self.tp_rank * count, (self.tp_rank + 1) * count)

    def kv_heads(self, config: ModelConfig) -> range:
        """The key/value heads that those need; places may share some."""
        per_kv = config.num_heads // config.kv_heads
        heads = self.heads(config)
        return range(heads[0] // per_kv, heads[-1] // per_kv + 1)

    def kv_of_head(self, config: ModelConfig) -> tuple[int, ...] | None:
        """For each query head which of its key/value heads it has; None where those have equal groups in order."""
        per_kv, heads, kv_heads = config.num_heads // config.kv_heads, self.heads(config), self.kv_heads(config)
        found = tuple(head // per_kv - kv_heads.start for head in heads)
        group, left = divmod(len(heads), len(kv_heads))
        return None if left == 0 and found == tuple(index // group for index in range(len(heads))) else found

    def vocabulary(self, config: ModelConfig) -> range:
        """The token ids of this place; sizes differ by one where tp does not divide the vocabulary."""
        size = config.vocab_size
        return range(size * self.tp_rank // self.tp, size * (self.tp_rank + 1) // self.tp)

    def num_foreign_kv_heads(self, config: ModelConfig) -> int:
        """How many of this place's key/value heads one before it holds too: they are the first ones."""
        if self.tp_rank == 0:
            return 0
        before = TensorSplit(self.tp, self.tp_rank - 1, self.sequence_parallel).kv_heads(config)
        return max(0, before.stop - self.kv_heads(config).start)

    def shares_kv_heads(self, config: ModelConfig) -> bool:
        """Whether any two places hold the same key/value head."""
        return config.kv_heads % self.tp != 0


UNSPLIT = TensorSplit(1, 0, False)


def possible_degrees(config: ModelConfig) -> dict[str, list[int]]:
    """By axis the degrees that the model can be split by."""
    tp = [n for n in range(1, config.num_heads + 1) if config.num_heads % n == 0 and config.ffn_size % n == 0]
    return {"tp": tp, "pp": list(range(1, config.num_layers + 1))}


def check_split(config: ModelConfig, tp: int) -> None:
    """Refuse a tensor-parallel degree that the model cannot be split by.

    Raises:
        ConfigError: with the degrees that work.
    """
    works = possible_degrees(config)["tp"]
    if tp not in works:
        raise SizesError(
            f"parallel.tp={tp} does not split model.num_heads={config.num_heads} and the feed-forward size "
            f"{config.ffn_size} evenly.",
            one_of("parallel.tp", nearest(works, tp)),
            f"Use tp={_listed(works)}",
        )
    if tp > config.vocab_size:
        raise ConfigError(f"parallel.tp={tp} is more than model.vocab_size={config.vocab_size} token ids")


def row_unit(config: Config, tp: int) -> int:
    """Tokens of which a row of pieces has a multiple, by padding: into so many tp ranks and tiles cut it evenly."""
    parallel = config.parallel
    return 1 if tp == 1 else parallel.tp_tiles * (tp if parallel.sequence_parallel else 1)


def check_rows(config: Config, tp: int) -> None:
    """Refuse rows of tokens that tp ranks or tiles do not cut evenly.

    With parallel.hdp rows are padded, and what counts is the capacity: a full row has to stay within it.

    Raises:
        ConfigError: with the nearest lengths or numbers of tiles that work.
    """
    if config.parallel.hdp is not None:
        _check_capacity(config, config.parallel.hdp.capacity_tokens, row_unit(config, tp))
    elif tp > 1:
        _check_seq_len(config.data.seq_len, tp, config.parallel.sequence_parallel)
        _check_tiles(config, tp)


def _check_capacity(config: Config, capacity: int, unit: int) -> None:
    if capacity % unit == 0:
        return
    cut = []
    if config.parallel.sequence_parallel:
        cut.append(f"the parallel.tp={config.parallel.tp} ranks of sequence parallel")
    if config.parallel.tp_tiles > 1:
        cut.append(f"parallel.tp_tiles={config.parallel.tp_tiles}")
    fits = max(1, capacity // unit) * unit
    raise SizesError(
        f"parallel.hdp.capacity_tokens={capacity} is not a multiple of {unit}, into which {' and '.join(cut)} cut a "
        "row.",
        one_of("parallel.hdp.capacity_tokens", [fits, fits + unit]),
        f"Use capacity_tokens={fits}",
    )


def _check_seq_len(seq_len: int, tp: int, sequence_parallel: bool) -> None:
    if sequence_parallel and seq_len % tp:
        below = seq_len // tp * tp
        lengths = one_of("data.seq_len", [below, below + tp] if below else [tp])
        raise SizesError(
            f"data.seq_len={seq_len} is not a multiple of parallel.tp={tp}, which sequence parallel needs.",
            [*lengths, Change({"parallel.sequence_parallel": False})],
            f"Use seq_len={below or tp} or {below + tp}, or parallel.sequence_parallel=false",
        )


def _check_tiles(config: Config, tp: int) -> None:
    """Of a share's tokens with sequence parallel, else of a micro-batch's."""
    num_tiles, sequence_parallel = config.parallel.tp_tiles, config.parallel.sequence_parallel
    seq_len, micro_batch_size = config.data.seq_len, config.train.micro_batch_size
    rows = seq_len // tp if sequence_parallel else seq_len * micro_batch_size
    if rows % num_tiles == 0:
        return
    below = max(n for n in range(1, min(num_tiles, rows + 1)) if rows % n == 0)
    above = min((n for n in range(num_tiles + 1, rows + 1) if rows % n == 0), default=None)
    what = f"data.seq_len={seq_len} / parallel.tp={tp} tokens of a sequence that each rank has with sequence parallel"
    if not sequence_parallel:
        what = f"data.seq_len={seq_len} * train.micro_batch_size={micro_batch_size} tokens of a micro-batch"
    numbers = [below] if above is None else [below, above]
    raise SizesError(
        f"parallel.tp_tiles={num_tiles} does not divide the {rows} rows that it cuts, the {what}.",
        one_of("parallel.tp_tiles", numbers),
        f"Use tp_tiles={' or '.join(map(str, numbers))}",
    )


@lru_cache(maxsize=1024)
def plan_parameters(
    config: ModelConfig, max_seq_len: int, part: ModelPart, split: TensorSplit
) -> tuple[LocalParameter, ...]:
    """This rank's parameters, in the order in which its model part names them. Traffic, memory, hidden communication
    and the checkpoint of a plan ask for the same ones, so many are remembered.
    """
    return tuple(_parameters(config, max_seq_len, part, split))


def num_parameters(config: ModelConfig, max_seq_len: int) -> int:
    """Numbers in the whole model."""
    plans = plan_parameters(config, max_seq_len, ModelPart.whole(config), UNSPLIT)
    return sum(plan.box.num_elements for plan in plans)


def _parameters(config: ModelConfig, max_seq_len: int, part: ModelPart, split: TensorSplit) -> Iterator[LocalParameter]:
    hidden, is_gpt = config.hidden_size, config.family == "gpt"
    vocabulary = _box((config.vocab_size, hidden), 0, split.vocabulary(config))
    is_whole = part.has_embedding and part.has_head
    tied_apart = config.tied_embeddings and not is_whole
    if part.has_embedding:
        yield LocalParameter("embedding.weight", "embedding.weight", *vocabulary, is_tied=tied_apart)
        if is_gpt:
            yield _replicated("positions.weight", (max_seq_len, hidden), split)
    for layer in part.layers:
        yield from _layer(config, f"layers.{layer}", split)
    if part.has_head:
        yield from _norm("norm", config, split)
        if not config.tied_embeddings:
            yield LocalParameter("head.weight", "head.weight", *vocabulary)
        elif not is_whole:
            yield LocalParameter("head.weight", "embedding.weight", *vocabulary, None, is_tied=True)


def _layer(config: ModelConfig, prefix: str, split: TensorSplit) -> Iterator[LocalParameter]:
    hidden, ffn, size, is_gpt = config.hidden_size, config.ffn_size, config.head_size, config.family == "gpt"
    heads = _scaled(split.heads(config), size)
    is_parallel = config.block == "parallel"
    yield from _norm(f"{prefix}.norm" if is_parallel else f"{prefix}.attention_norm", config, split)
    yield from _column(f"{prefix}.attention.q", (hidden, hidden), heads, is_gpt)
    for name in ("k", "v"):
        yield from _key_value(f"{prefix}.attention.{name}", config, split)
    yield from _row(f"{prefix}.attention.out", (hidden, hidden), heads, is_gpt, split)
    if not is_parallel:
        yield from _norm(f"{prefix}.ffn_norm", config, split)
    columns = range(ffn * split.tp_rank // split.tp, ffn * (split.tp_rank + 1) // split.tp)
    for name in ("up",) if is_gpt else ("gate", "up"):
        yield from _column(f"{prefix}.ffn.{name}", (ffn, hidden), columns, is_gpt)
    yield from _row(f"{prefix}.ffn.down", (hidden, ffn), columns, is_gpt, split)


def _column(name: str, shape: tuple[int, int], rows: range, has_bias: bool) -> Iterator[LocalParameter]:
    """A linear whose output features are split."""
    yield LocalParameter(f"{name}.weight", f"{name}.weight", *_box(shape, 0, rows))
    if has_bias:
        yield LocalParameter(f"{name}.bias", f"{name}.bias", *_box(shape[:1], 0, rows))


def _row(
    name: str, shape: tuple[int, int], columns: range, has_bias: bool, split: TensorSplit
) -> Iterator[LocalParameter]:
    """A linear whose input features are split; its bias is added once, behind the sum."""
    yield LocalParameter(f"{name}.weight", f"{name}.weight", *_box(shape, 1, columns))
    if has_bias:
        yield _replicated(f"{name}.bias", shape[:1], split)


def _key_value(name: str, config: ModelConfig, split: TensorSplit) -> Iterator[LocalParameter]:
    size = config.head_size
    heads = split.kv_heads(config)
    rows = _scaled(heads, size)
    tp_sum: Literal["none", "kv"] = "kv" if split.shares_kv_heads(config) else "none"
    # Each head is counted where it is held first, so what a place counts of its heads are the last ones.
    num_foreign = split.num_foreign_kv_heads(config)
    shapes: list[tuple[str, tuple[int, ...]]] = [("weight", (config.kv_heads * size, config.hidden_size))]
    if config.family == "gpt":
        shapes.append(("bias", (config.kv_heads * size,)))
    for kind, shape in shapes:
        counted_from = num_foreign * size * shape[-1] if len(shape) == 2 else num_foreign * size
        last = None if num_foreign == len(heads) else counted_from
        yield LocalParameter(f"{name}.{kind}", f"{name}.{kind}", *_box(shape, 0, rows), last, tp_sum)


def _norm(name: str, config: ModelConfig, split: TensorSplit) -> Iterator[LocalParameter]:
    for kind in ("weight", "bias") if config.family == "gpt" else ("weight",):
        yield _replicated(f"{name}.{kind}", (config.hidden_size,), split)


def _replicated(name: str, shape: tuple[int, ...], split: TensorSplit) -> LocalParameter:
    whole = Box((0,) * len(shape), shape)
    is_partial = split.sequence_parallel and split.tp > 1
    return LocalParameter(name, name, shape, whole, None if split.tp_rank else 0, "all" if is_partial else "none")


def _box(shape: tuple[int, ...], dim: int, part: range) -> tuple[tuple[int, ...], Box]:
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = part.start, len(part)
    return shape, Box(tuple(offsets), tuple(sizes))


def _scaled(part: range, factor: int) -> range:
    return range(part.start * factor, part.stop * factor)


def _listed(numbers: list[int]) -> str:
    return (
        " or ".join(map(str, numbers)) if len(numbers) < 3 else f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
    )

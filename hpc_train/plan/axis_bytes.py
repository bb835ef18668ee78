"""How many bytes ranks send along each axis of a mesh in one step, from a run's own model, batch and options.

What is counted is what the ranks' code sends: gradients as parallel.gradient_wire says and parameters in their own type
over dp, activations and their gradients of each micro-batch over pp, the exchanges of each layer over tp. A test holds
it against the bytes that really went through the collectives. Left out: the five numbers that all ranks sum at a step
end, LAMB's two numbers a matrix, and evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from hpc_train.config import Config
from hpc_train.plan.batch import check_batch_sizes
from hpc_train.plan.cost import micro_batch_shape
from hpc_train.plan.flat import lay_out
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.parameters import LocalParameter, ModelPart, TensorSplit, check_rows, check_split, plan_parameters
from hpc_train.plan.stages import stage_parts

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
"""Of a parameter or an activation, by train.precision."""
EXACT_BYTES = 4
"""Of a gradient sum, a master weight and a moment: fp32 in every precision."""


@dataclass(frozen=True)
class AxisTraffic:
    """What a rank sends along one axis in one step, in bytes; the mean over the ranks that send.

    pattern: "ring": each rank of a group sends to the next, the last to the first. "line": neighbours send both ways.
    "wrap": a line whose ends are neighbours too. forward_bytes: to the next rank (ring: all of it; else activations).
    backward_bytes: to the previous rank (gradients; ring: 0). ends_bytes: what the first and the last rank of a group
    send each other besides (tied embeddings; what goes round again with virtual stages).
    """

    axis: str
    pattern: Literal["ring", "line", "wrap"]
    forward_bytes: int
    backward_bytes: int
    ends_bytes: int = 0


@dataclass(frozen=True)
class SentBytes:
    """What one rank sends in one step along each axis, in bytes. pp_ends: to the other copy of tied embeddings."""

    pp_forward: int
    pp_backward: int
    pp_ends: int
    dp: int
    cp: int
    tp: int


def axis_traffic(config: Config, mesh: Mesh) -> tuple[AxisTraffic, ...]:
    """The traffic of each axis that has more than one rank, outermost first.

    The mesh may differ from what the configuration asks for, so that meshes can be compared.

    Raises:
        ConfigError: the model or the batch cannot be split so.
    """
    every = [sent for _, sent in every_rank_kind(config, mesh)]
    found = []
    if mesh.pp > 1:
        neighbours = max(sent.pp_forward for sent in every)
        # With virtual stages the last stage sends on to the first, all but what leaves the last chunk.
        around = min(sent.pp_forward for sent in every)
        ends = max(sent.pp_ends for sent in every)
        found.append(AxisTraffic("pp", "line", neighbours, neighbours, around + ends))
    for axis in ("dp", "cp", "tp"):
        if getattr(mesh, axis) > 1:
            mean = -(-sum(getattr(sent, axis) for sent in every) // len(every))
            found.append(AxisTraffic(axis, "ring", mean, 0))
    return tuple(found)


def every_rank_kind(config: Config, mesh: Mesh) -> Iterator[tuple[tuple[int, int], SentBytes]]:
    """For each (stage, place on the tp axis) what a rank there sends; along dp and cp all ranks are alike."""
    check_split(config.model, mesh.tp)
    check_rows(config, mesh.tp)
    num_micro_batches = micro_batches_of(config, mesh)
    parts = stage_parts(config, mesh)
    for stage in range(mesh.pp):
        for tp_rank in range(mesh.tp):
            split = TensorSplit(mesh.tp, tp_rank, is_split_by_tokens(config, mesh))
            of_chunks = [_sent_bytes(config, mesh, part, split, num_micro_batches) for part in parts[stage :: mesh.pp]]
            yield (stage, tp_rank), _sum(of_chunks, has_both_ends=mesh.pp == 1)


def micro_batches_of(config: Config, mesh: Mesh) -> int:
    """Forwards per step of each pipeline; with parallel.hdp, where they differ, as many as full ones would be.

    Raises:
        ConfigError: the batch cannot be shared equally.
    """
    train, hdp = config.train, config.parallel.hdp
    if hdp is not None:
        full = -(-train.global_batch_size * config.data.seq_len // (mesh.dp * mesh.cp * hdp.capacity_tokens))
        return max(full, mesh.pp)
    check_batch_sizes(train.global_batch_size, train.micro_batch_size, mesh.dp)
    return train.global_batch_size // (mesh.dp * train.micro_batch_size)


def is_split_by_tokens(config: Config, mesh: Mesh) -> bool:
    """Whether the residual stream is shared by sequence parallel; without tp there is nobody to share with."""
    return config.parallel.sequence_parallel and mesh.tp > 1


def _sum(of_chunks: Sequence[SentBytes], *, has_both_ends: bool) -> SentBytes:
    """What a rank sends for all its model_chunks. has_both_ends: messages and copies of tied embeddings stay there."""
    totals = {field.name: sum(getattr(sent, field.name) for sent in of_chunks) for field in fields(SentBytes)}
    if has_both_ends:
        totals |= {"pp_forward": 0, "pp_backward": 0, "pp_ends": 0}
    return SentBytes(**totals)


def _sent_bytes(config: Config, mesh: Mesh, part: ModelPart, split: TensorSplit, num_micro_batches: int) -> SentBytes:
    plans = plan_parameters(config.model, config.data.seq_len, part, split)
    gradients = _gradient_ring(config, mesh, plans)
    message = _message_bytes(config, mesh) * num_micro_batches
    tied = sum(plan.box.num_elements for plan in plans if plan.is_tied) * EXACT_BYTES
    return SentBytes(
        pp_forward=0 if part.has_head else message,
        pp_backward=0 if part.has_embedding else message,
        pp_ends=tied,
        # In a ring over dp x cp, cp inner, one rank of each cp group sends on to the next place of dp.
        dp=gradients // mesh.cp if mesh.dp > 1 else 0,
        cp=_key_value_ring(config, mesh, part, split) * num_micro_batches
        + (gradients * (mesh.cp - 1) // mesh.cp if mesh.dp > 1 else gradients),
        tp=_tensor_exchanges(config, mesh, part) * num_micro_batches + _tp_gradient_sums(plans, mesh.tp),
    )


def _micro_batch_tokens(config: Config, mesh: Mesh) -> int:
    """Of one rank, at most."""
    num_sequences, seq_len = micro_batch_shape(config)
    return num_sequences * seq_len // mesh.cp


def dp_element_bytes(config: Config) -> tuple[int, int]:
    """What an all-gather and a reduce-scatter send of each element."""
    return ELEMENT_BYTES[config.train.precision], ELEMENT_BYTES[config.parallel.gradient_wire]


def _message_bytes(config: Config, mesh: Mesh) -> int:
    """The residual stream of one micro-batch between two stages. With sequence parallel each tp rank sends its share
    of the tokens; without, each sends the whole, which it has.
    """
    tokens = _micro_batch_tokens(config, mesh)
    shares = mesh.tp if is_split_by_tokens(config, mesh) else 1
    return tokens // shares * config.model.hidden_size * ELEMENT_BYTES[config.train.precision]


def _gradient_ring(config: Config, mesh: Mesh, plans: tuple[LocalParameter, ...]) -> int:
    """Reduce-scatter of gradients in the type of the wire and all-gather of parameters in their own, once a step each.

    Both send all shards but one, in a ring or directly, padding included.
    """
    num_ranks = mesh.dp * mesh.cp
    layout = lay_out([(plan.local_name, plan.box.sizes) for plan in plans], num_ranks)
    return (num_ranks - 1) * layout.shard_elements * sum(dp_element_bytes(config))


def _key_value_ring(config: Config, mesh: Mesh, part: ModelPart, split: TensorSplit) -> int:
    """Keys and values of one micro-batch, which travel around the cp ring in each layer.

    cp - 1 passes in the forward; in the backward again, with their gradients, which go one pass further to be home;
    and once more where the forward of attention is recomputed. Assumed: gradients travel in the type of activations.

    Source: Liu et al., "Ring attention with blockwise transformers for near-infinite context", ICLR'24.
    """
    if mesh.cp == 1:
        return 0
    model = config.model
    tokens = _micro_batch_tokens(config, mesh)
    width = 2 * len(split.kv_heads(model)) * model.head_size
    once = tokens * width * ELEMENT_BYTES[config.train.precision]
    passes = (mesh.cp - 1) * (2 if config.train.recompute == "none" else 3) + mesh.cp
    return len(part.layers) * passes * once


def _tensor_exchanges(config: Config, mesh: Mesh, part: ModelPart) -> int:
    """What a rank sends to its tp group for one micro-batch.

    In units of one all-gather or reduce-scatter of the residual stream; an all-reduce is two. To enter and to leave is
    two units each, forward and backward together, with sequence parallel or without. A serial block does it for
    attention and for the feed-forward part, so eight; a parallel block once, so four. The embedding is left, the head
    entered. A recomputed block repeats its forward's exchanges up to the last value that its backward needs: that is
    the input of the last linear, so the last leaving is not repeated, unless its result is dropped out. The loss sends
    two fp32 numbers a token to each other rank.
    """
    n = mesh.tp
    if n == 1:
        return 0
    tokens = _micro_batch_tokens(config, mesh)
    times = 1 if config.model.block == "parallel" else 2
    in_layer = 4 * times
    if config.train.recompute == "full":
        entering, leaving = (1, 1) if is_split_by_tokens(config, mesh) else (0, 2)
        in_layer += times * entering + leaving * (times if config.model.dropout else times - 1)
    units = in_layer * len(part.layers) + 2 * part.has_embedding + 2 * part.has_head
    stream = tokens * config.model.hidden_size * ELEMENT_BYTES[config.train.precision]
    loss = 2 * tokens * EXACT_BYTES * (n - 1) if part.has_head else 0
    return units * stream * (n - 1) // n + loss


def _tp_gradient_sums(plans: tuple[LocalParameter, ...], tp: int) -> int:
    """All-reduces, once a step, of gradients that several tp ranks hold: norms and the like, shared K/V heads."""
    whole = sum(plan.box.num_elements for plan in plans if plan.tp_sum == "all")
    for plan in plans:
        if plan.tp_sum == "kv":
            count = 1
            for extent in plan.shape:
                count *= extent
            whole += count
    return 2 * whole * EXACT_BYTES * (tp - 1) // tp

"""What a step takes of each rank's memory, and whether a plan fits the GPU that it is for.

The terms follow the code: flat buffers of parameters and of fp32 gradients, the optimizer's share of fp32 states,
what forwards keep (plan/activations.py) for as many micro-batches as the schedule has in flight, and buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from hpc_train.config import Config
from hpc_train.errors import ConfigError
from hpc_train.plan.activations import (
    Device,
    Shape,
    block_bytes,
    head_bytes,
    logits_bytes,
    mask_bytes,
    queued_bytes,
    saved_bytes,
    shape_of,
)
from hpc_train.plan.axis_bytes import ELEMENT_BYTES, EXACT_BYTES, is_split_by_tokens, micro_batches_of
from hpc_train.plan.changes import Change, CostlySizesError, largest_divisor, one_of
from hpc_train.plan.flat import FlatLayout, lay_out
from hpc_train.plan.in_flight import most_in_flight
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.parameters import (
    LocalParameter,
    ModelPart,
    TensorSplit,
    check_rows,
    check_split,
    num_parameters,
    plan_parameters,
)
from hpc_train.plan.schedule_collectives import early_chunks, updates_early
from hpc_train.plan.schedule_orders import check_micro_batches
from hpc_train.plan.stages import stage_parts

NOT_OURS = 0.06
"""Share of a GPU that tensors cannot have: CUDA's context, NCCL's and cuBLAS's buffers, what the allocator cannot use
(assumed; about 5 GB of 80)."""
_MOMENTS = 2
_SMALLER = "more ranks, a smaller train.micro_batch_size or data.seq_len"
_MAX_TP = 8  # assumed: GPUs that share a node's fast links, where the configuration names no larger tp


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the fullest rank of a stage.

    activations: kept by forwards for their backwards, and with full recomputation the block that is done again.
    buffers: inputs, messages between stages, what the loss and one block's backward work with, scratch of collectives.
    at_start: what the rank takes while weights are set and put into flat buffers, before there are activations.
    in_flight: micro-batches whose activations are kept at once, once for each model_chunk.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    at_start: int
    in_flight: int

    @property
    def total(self) -> int:
        """The peak: of a step, or of the start where that is higher."""
        return max(sum(self.terms.values()), self.at_start)

    @property
    def terms(self) -> dict[str, int]:
        """The parts of a step's peak."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("at_start", "in_flight")
        }


def memory_of_stage(
    config: Config, mesh: Mesh, stage: int, *, device: Device = "cuda", is_masked: bool = True
) -> MemoryEstimate:
    """The fullest rank of a pipeline stage, at its peak in a step.

    To call from Python for a stage of one's choice; `hpc-train plan` tells the fullest one.

    Args:
        device: "cpu" counts what torch's kernels and gloo keep there, which tests can measure.
        is_masked: Sequences hold several documents, so that attention has masks. False where none does.

    Raises:
        ConfigError: the model or the batch cannot be split so.
    """
    _check_mesh(config, mesh)
    return _memory_of_parts(config, mesh, stage, stage_parts(config, mesh)[stage :: mesh.pp], device, is_masked)


def fullest_stage(config: Config, mesh: Mesh, *, device: Device = "cuda") -> tuple[int, MemoryEstimate]:
    """The stage whose ranks take most, and what they take; the first of several."""
    return _fullest(config, mesh, stage_parts(config, mesh), device)


def _fullest(
    config: Config, mesh: Mesh, parts: Sequence[ModelPart], device: Device = "cuda"
) -> tuple[int, MemoryEstimate]:
    _check_mesh(config, mesh)
    kinds: dict[tuple[object, ...], int] = {}
    for stage in range(mesh.pp):
        # Of stages that hold alike, the first has most micro-batches in flight; but W comes later on later ones.
        held = [
            (config.model.windows[part.layers.start : part.layers.stop], part.has_embedding, part.has_head)
            for part in parts[stage :: mesh.pp]
        ]
        kinds.setdefault((*held, stage if config.parallel.schedule == "zero_bubble" else 0), stage)
    estimates = {
        stage: _memory_of_parts(config, mesh, stage, parts[stage :: mesh.pp], device, True) for stage in kinds.values()
    }
    stage = max(estimates, key=lambda index: (estimates[index].total, -index))
    return stage, estimates[stage]


def check_memory(config: Config, mesh: Mesh, gpu_memory_bytes: int) -> None:
    """Refuse a plan that cannot fit.

    Raises:
        ConfigError: with the largest terms, and the nearest mesh of as many ranks that fits.
    """
    usable = int(gpu_memory_bytes * (1 - NOT_OURS))
    stage, estimate = fullest_stage(config, mesh)
    if estimate.total <= usable:
        return
    if estimate.at_start == estimate.total:
        why = f"most of it, {_gib(estimate.at_start)}, already while weights are set at the start"
    else:
        largest = sorted(estimate.terms.items(), key=lambda item: -item[1])[:2]
        batches = f"{estimate.in_flight} micro-batch{'es' if estimate.in_flight > 1 else ''}"
        names = {"activations": f"activations of {batches}", "optimizer": "optimizer states"}
        why = "the largest terms are " + " and ".join(f"{names.get(name, name)} {_gib(size)}" for name, size in largest)
    raise CostlySizesError(
        f"{mesh.describe()} does not fit: a rank of stage {stage} needs about {_gib(estimate.total)}, and a GPU of "
        f"{_gib(gpu_memory_bytes)} has about {_gib(usable)} for tensors; {why}.",
        lambda: _advice(config, mesh, usable),
        f"Use {_SMALLER}.",
        _smaller(config, mesh),
    )


def nearest_mesh_that_fits(config: Config, mesh: Mesh, usable_bytes: int) -> Mesh | None:
    """Of the meshes of as many ranks, with the same cp, the one with the fewest doublings of an axis between; among
    those that with the most data parallelism, then the smaller tp. None where none fits.
    """
    numbers = num_parameters(config.model, config.data.seq_len)
    parts: dict[int, tuple[ModelPart, ...]] = {}
    for other in sorted(_meshes_like(mesh, max(_MAX_TP, mesh.tp)), key=lambda other: _distance(mesh, other)):
        # Some rank has at least its share of the parameters and of their gradients.
        least = numbers * (ELEMENT_BYTES[config.train.precision] + EXACT_BYTES) // (other.pp * other.tp)
        if other.pp > config.model.num_layers or least > usable_bytes:
            continue
        if other.pp == 1 and config.parallel.schedule == "zero_bubble":
            continue
        try:
            if other.pp not in parts:
                parts[other.pp] = stage_parts(config, other)
            if _fullest(config, other, parts[other.pp])[1].total <= usable_bytes:
                return other
        except ConfigError:
            continue  # a mesh that the model or the batch cannot be split by
    return None


def _check_mesh(config: Config, mesh: Mesh) -> None:
    check_split(config.model, mesh.tp)
    check_rows(config, mesh.tp)
    check_micro_batches(mesh.pp, micro_batches_of(config, mesh))


def _memory_of_parts(
    config: Config, mesh: Mesh, stage: int, parts: Sequence[ModelPart], device: Device, is_masked: bool
) -> MemoryEstimate:
    splits = [TensorSplit(mesh.tp, tp_rank, is_split_by_tokens(config, mesh)) for tp_rank in range(mesh.tp)]
    # Shares of the vocabulary grow towards the last; only unevenly shared heads can make another one fuller.
    chosen = splits if splits[0].shares_kv_heads(config.model) else splits[-1:]
    ranks = (_memory_of_rank(config, mesh, stage, parts, split, device, is_masked) for split in chosen)
    return max(ranks, key=lambda estimate: estimate.total)


def _memory_of_rank(
    config: Config,
    mesh: Mesh,
    stage: int,
    parts: Sequence[ModelPart],
    split: TensorSplit,
    device: Device,
    is_masked: bool,
) -> MemoryEstimate:
    of_parts = [plan_parameters(config.model, config.data.seq_len, part, split) for part in parts]
    plans = [plan for of_part in of_parts for plan in of_part]
    layouts = [
        lay_out([(plan.local_name, plan.box.sizes) for plan in of_part], mesh.dp * mesh.cp) for of_part in of_parts
    ]
    shape = shape_of(config, mesh, split, is_masked)
    found = most_in_flight(
        config.parallel.schedule,
        mesh.pp,
        micro_batches_of(config, mesh),
        stage,
        [saved_bytes(config, part, split, shape, device) for part in parts],
        [queued_bytes(config, part, shape) for part in parts],
    )
    width = ELEMENT_BYTES[config.train.precision]
    # In fp32 the master weights are the parameters themselves.
    states = _MOMENTS + (1 if width < EXACT_BYTES else 0)
    optimizer = sum(layout.shard_elements for layout in layouts) * EXACT_BYTES * states
    if updates_early(config, mesh):
        optimizer += _taken_back_bytes(config, parts, layouts)
    kept = _inputs_bytes(config, mesh, parts, shape)
    kept += sum(
        _messages_bytes(config, mesh, part, shape, count) for part, count in zip(parts, found.forwarded, strict=True)
    )
    if device == "cpu":
        kept += _gloo_tp_bytes(config, mesh, shape)
        if config.parallel.gradient_wire == "fp32":
            kept += sum(_gloo_bytes(mesh, layout) for layout in layouts)
    again, working = max(
        (
            _working_bytes(config, part, split, shape, layout, device)
            for part, layout in zip(parts, layouts, strict=True)
        ),
        key=sum,
    )
    activations = found.num_bytes + again
    summing = _summing_bytes(plans, split.tp) - activations
    return MemoryEstimate(
        parameters=sum(layout.padded_elements for layout in layouts) * width,
        gradients=sum(layout.padded_elements for layout in layouts) * EXACT_BYTES,
        optimizer=optimizer,
        activations=activations,
        buffers=kept + max(working, summing),
        at_start=_start_bytes(of_parts, layouts, width),
        in_flight=sum(found.forwarded) + sum(found.queued),
    )


def _taken_back_bytes(config: Config, parts: Sequence[ModelPart], layouts: Sequence[FlatLayout]) -> int:
    """Copies of weights, moments and gradients of shards that are updated early, from which they are taken back."""
    early = early_chunks(len(parts), has_tied_last=config.model.tied_embeddings and parts[-1].has_head)
    return sum(layouts[own].shard_elements for own in early) * EXACT_BYTES * (_MOMENTS + 2)


def _inputs_bytes(config: Config, mesh: Mesh, parts: Sequence[ModelPart], shape: Shape) -> int:
    """Token ids, labels, positions and documents of all micro-batches of the step, 8 bytes each, and their masks."""
    numbers = (4 if shape.is_masked else 3) * 8 * shape.num_tokens
    layers = [layer for part in parts for layer in part.layers]
    return micro_batches_of(config, mesh) * (numbers + mask_bytes(config, layers, shape))


def _messages_bytes(config: Config, mesh: Mesh, part: ModelPart, shape: Shape, in_flight: int) -> int:
    """What a stage keeps to send and to receive. It lets go of an activation with its backward, and of a gradient when
    it has an activation that the receiver made behind it, of the last ones at the end of the step. An evaluation keeps
    no more: plan_forward_only lets few sends be under way.
    """
    if mesh.pp == 1:
        return 0
    count = micro_batches_of(config, mesh)
    num_sent = (0 if part.has_head else in_flight) + (0 if part.has_embedding else min(in_flight + 1, count))
    # A receive is posted an action ahead, from each neighbour. What entered is kept, unless a norm keeps that very one.
    num_received = (not part.has_head) + (not part.has_embedding)
    is_copied = (
        config.model.family == "llama" and config.train.recompute != "full" and shape.element_bytes < EXACT_BYTES
    )
    num_received += in_flight if is_copied and not part.has_embedding else 0
    return (num_sent + num_received) * shape.stream_bytes


def _working_bytes(
    config: Config, part: ModelPart, split: TensorSplit, shape: Shape, layout: FlatLayout, device: Device
) -> tuple[int, int]:
    """The most that a backward takes beside what forwards kept: what a recomputed block keeps, and what is worked with.

    Of the loss, its input and a chunk's logits, and in bf16 the weight's gradient in that type too. Of a block,
    gradients in the feed-forward part; by then what the head kept is gone. And the gradient of one weight matrix before
    it is added to its sum; with tp those of all that read the same input, unless they wait for their W. Dropout draws
    with three whole numbers of 8 bytes an element.
    """
    a, N = shape.element_bytes, shape.num_tokens
    dropout = 3 * 8 * shape.stream_tokens * shape.hidden if config.model.dropout else 0
    weight = max((parameter.num_elements for parameter in layout.parameters), default=0)
    if split.tp > 1 and config.parallel.schedule != "zero_bubble":
        reading = [shape.query_width + 2 * shape.kv_width, (1 if config.model.family == "gpt" else 2) * shape.ffn]
        weight = max(weight, shape.hidden * (sum(reading) if config.model.block == "parallel" else max(reading)))
    block = N * a * (shape.hidden + (2 if config.model.family == "gpt" else 3) * shape.ffn) + weight * a
    again = 0
    if config.train.recompute == "full":
        again = max(block_bytes(config, split, shape, device, layer) for layer in part.layers)
    if not part.has_head:
        return again, max(block, dropout)
    narrow_weight = shape.vocabulary * shape.hidden * a if a < EXACT_BYTES else 0
    head = N * shape.hidden * a + narrow_weight + logits_bytes(shape, device)
    gone = head_bytes(config, shape, device)
    most = max(head, again + max(block, dropout) - gone)
    again = max(0, again - gone)
    return again, most - again


def _summing_bytes(plans: Sequence[LocalParameter], tp: int) -> int:
    """Copies for sums of gradients behind a chunk's last backward: tied embeddings, and what tp ranks hold together."""
    tied = sum(plan.box.num_elements for plan in plans if plan.is_tied)
    shared = sum(plan.box.num_elements for plan in plans if plan.tp_sum != "none") if tp > 1 else 0
    # A copy, and on gloo as much for what the other sends.
    return 2 * EXACT_BYTES * max(tied, shared)


def _gloo_bytes(mesh: Mesh, layout: FlatLayout) -> int:
    """What the reduce-scatter of a model_chunk receives from each other rank, since several run at once; kept. As bf16
    they arrive in the gradient buffer itself.
    """
    return (mesh.dp * mesh.cp - 1) * layout.shard_elements * EXACT_BYTES


def _gloo_tp_bytes(config: Config, mesh: Mesh, shape: Shape) -> int:
    """What sums of the stream over tp receive from each other rank, kept. More than two ranks without sequence parallel
    leave it to gloo.
    """
    if is_split_by_tokens(config, mesh):
        return (mesh.tp - 1) * shape.stream_bytes
    return shape.stream_bytes if mesh.tp == 2 else 0


def _start_bytes(of_parts: Sequence[Sequence[LocalParameter]], layouts: Sequence[FlatLayout], width: int) -> int:
    """The peak while one model_chunk after the other is built; those before it have their buffers."""
    peak = built = 0
    for plans, layout in zip(of_parts, layouts, strict=True):
        peak = max(peak, built + _chunk_start_bytes(plans, layout, width))
        built += layout.padded_elements * (width + EXACT_BYTES)
        built += layout.shard_elements * EXACT_BYTES if width < EXACT_BYTES else 0
    return peak


def _chunk_start_bytes(plans: Sequence[LocalParameter], layout: FlatLayout, width: int) -> int:
    """While the model's tensors move into flat buffers: they, gradients and fp32 weights are there at once, and in bf16
    the model's buffer too. Before that, each whole parameter once, of which a part is taken.
    """
    count, padded = layout.num_elements, layout.padded_elements
    moving = EXACT_BYTES * (count + 2 * padded)
    if width < EXACT_BYTES:
        moving += width * padded + EXACT_BYTES * layout.shard_elements
    whole = 0
    for plan in plans:
        size = EXACT_BYTES
        for extent in plan.shape:
            size *= extent
        whole = max(whole, size)
    return max(moving, EXACT_BYTES * count + whole)


def _meshes_like(mesh: Mesh, max_tp: int) -> Iterator[Mesh]:
    """Every other mesh of the same world size and cp, tp up to max_tp."""
    left = mesh.world_size // mesh.cp
    for tp in (n for n in range(1, max_tp + 1) if left % n == 0):
        for pp in (n for n in range(1, left // tp + 1) if (left // tp) % n == 0):
            other = Mesh(pp, left // tp // pp, mesh.cp, tp)
            if other != mesh:
                yield other


def _distance(mesh: Mesh, other: Mesh) -> tuple[float, int, int]:
    """How far a mesh is from another: factors by which pp and tp change, multiplied; then what is preferred."""
    factor = 1.0
    for axis in ("pp", "tp"):
        before, after = getattr(mesh, axis), getattr(other, axis)
        factor *= max(before, after) / min(before, after)
    return factor, -other.dp, other.tp


def _advice(config: Config, mesh: Mesh, usable: int) -> tuple[list[Change], str]:
    """What fits as many ranks by its memory, as changes and in words."""
    other = nearest_mesh_that_fits(config, mesh, usable)
    if other is not None:
        return [_mesh_change(other)], f"With as many ranks use {other.describe()}"
    for recompute in ("selective", "full"):
        train = config.train.model_copy(update={"recompute": recompute})
        again = config.model_copy(update={"train": train})
        if config.train.recompute == "none" or recompute == "full":
            for candidate in (mesh, nearest_mesh_that_fits(again, mesh, usable)):
                if candidate is not None and fullest_stage(again, candidate)[1].total <= usable:
                    change = Change({"train.recompute": recompute, **_mesh_change(candidate).settings})
                    words = f"With as many ranks use train.recompute={recompute} and {candidate.describe()}"
                    return [change], words
    return [Change(num_ranks=2 * mesh.world_size)], (
        f"No mesh of {mesh.world_size} ranks fits, with recomputation neither: use {_SMALLER}"
    )


def _smaller(config: Config, mesh: Mesh) -> list[Change]:
    """What takes less memory, a step each, and is known at once."""
    train = config.train
    more = {"none": ["selective", "full"], "selective": ["full"], "full": []}[train.recompute]
    changes = one_of("train.recompute", more)
    size = largest_divisor(train.micro_batch_size, train.micro_batch_size - 1)
    changes += one_of("train.micro_batch_size", [] if size is None else [size])
    factor = mesh.dp // (largest_divisor(mesh.dp, mesh.dp - 1) or mesh.dp)
    if factor > 1:
        changes += [Change({"parallel.tp": mesh.tp * factor}), Change({"parallel.pp": mesh.pp * factor})]
    changes += one_of("data.seq_len", [config.data.seq_len // 2] if config.data.seq_len > 1 else [])
    return [*changes, Change(num_ranks=2 * mesh.world_size)]


def _mesh_change(mesh: Mesh) -> Change:
    return Change({"parallel.pp": mesh.pp, "parallel.tp": mesh.tp})


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"

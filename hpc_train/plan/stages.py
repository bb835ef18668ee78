"""Which layers each pipeline stage holds: as the configuration says, or split by what they cost.

A stage's cost is that of its layers, and on the first one of the embedding, on the last one of the head and the
loss. The slowest stage sets the pace of the pipeline, so its cost is made as small as it can be.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from math import inf
from typing import Literal

from hpc_train.config import Config, ModelConfig
from hpc_train.errors import ConfigError
from hpc_train.plan.changes import Change, SizesError, nearest, one_of
from hpc_train.plan.cost import attention_spans, layer_matmul_parameters, micro_batch_shape
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.parameters import ModelPart

# Operations on each logit in the forward and backward of the loss (derived: maximum, difference, exponential, sum;
# then scale and difference). Hardly anything beside the head's 6 * hidden_size.
LOSS_FLOPS_PER_LOGIT = 6


@dataclass(frozen=True)
class ModelCosts:
    """What one micro-batch costs, forward and backward, in floating-point operations."""

    layers: tuple[int, ...]
    embedding: int
    head_and_loss: int


def model_costs(
    model: ModelConfig,
    seq_len: int,
    micro_batch_size: int = 1,
    recompute: Literal["none", "selective", "full"] = "none",
) -> ModelCosts:
    """Costs of each layer and of the two ends of a model, by the same count as `cost.flops_per_token`.

    recompute: selective does the attention products' forward again in the backward, full the whole layer's. The
    embedding only copies rows and counts as nothing.
    """
    tokens = seq_len * micro_batch_size
    linears = 6 * layer_matmul_parameters(model)
    layers = []
    for span in attention_spans(model, seq_len):
        products = 12 * model.hidden_size * span
        # A backward is twice a forward, so the forward is a third.
        again = {"none": 0, "selective": products // 3, "full": (linears + products) // 3}[recompute]
        layers.append(tokens * (linears + products + again))
    head_and_loss = tokens * model.vocab_size * (6 * model.hidden_size + LOSS_FLOPS_PER_LOGIT)
    return ModelCosts(tuple(layers), 0, head_and_loss)


def plan_stages(config: Config, recompute: Literal["none", "selective", "full"] = "none") -> tuple[range, ...]:
    """The layers of each stage of a run, or of each virtual stage: pp * virtual_stages of them, in the model's order.

    As parallel.layers_per_stage says if given, else split by modelled cost.

    Raises:
        ConfigError: more stages than layers, or layers_per_stage that do not add up to model.num_layers.
    """
    model, parallel = config.model, config.parallel
    if parallel.virtual_stages > 1 and parallel.pp * parallel.virtual_stages > model.num_layers:
        works = model.num_layers // parallel.pp
        advice = f"Use virtual_stages={works}" if works else f"Use pp={model.num_layers} or less with virtual_stages=1"
        fewer = one_of("parallel.virtual_stages", [works] if works else [])
        fewer += one_of("parallel.pp", _numbers_of_stages(config, model.num_layers // parallel.virtual_stages))
        plain = [
            {"parallel.pp": pp, "parallel.virtual_stages": 1} for pp in _numbers_of_stages(config, model.num_layers)
        ]
        raise SizesError(
            f"parallel.virtual_stages={parallel.virtual_stages} on parallel.pp={parallel.pp} stages needs "
            f"{parallel.pp * parallel.virtual_stages} layers, one for each, and model.num_layers={model.num_layers}.",
            fewer + [Change(settings) for settings in plain],
            f"{advice}, or more layers.",
        )
    if parallel.pp > model.num_layers:
        raise SizesError(
            f"parallel.pp={parallel.pp} stages cannot share model.num_layers={model.num_layers}, since each holds a "
            "layer or more.",
            one_of("parallel.pp", _numbers_of_stages(config, model.num_layers)),
            f"Use parallel.pp={model.num_layers} or less, or more layers.",
        )
    num_sequences, seq_len = micro_batch_shape(config)
    costs = model_costs(model, seq_len, num_sequences, recompute)
    num_stages = parallel.pp * parallel.virtual_stages
    by_cost = split_layers(costs.layers, costs.embedding, costs.head_and_loss, num_stages)
    if parallel.layers_per_stage is None:
        return by_cost
    if sum(parallel.layers_per_stage) != model.num_layers:
        lengths = list(map(len, by_cost))
        raise SizesError(
            f"parallel.layers_per_stage={list(parallel.layers_per_stage)} adds up to {sum(parallel.layers_per_stage)} "
            f"layers, and model.num_layers={model.num_layers}.",
            one_of("parallel.layers_per_stage", [lengths, None]),
            f"By their cost they would be {lengths}; use that, or leave layers_per_stage out.",
        )
    return _ranges(parallel.layers_per_stage)


def _numbers_of_stages(config: Config, most: int) -> list[int]:
    """The nearest up to a number, of those that divide the present one, and so its ranks."""
    pp = config.parallel.pp
    return nearest([n for n in range(1, most + 1) if pp % n == 0], pp)


def stage_parts(config: Config, mesh: Mesh) -> tuple[ModelPart, ...]:
    """What each (virtual) stage of a mesh holds, also of one with another pp than the configuration's.

    Stage s of the mesh has those with numbers s, pp + s, and so on.

    Raises:
        ConfigError: more stages than layers, or layers_per_stage that do not add up to model.num_layers.
    """
    if mesh.pp != config.parallel.pp:
        parallel = config.parallel.model_copy(update={"pp": mesh.pp, "layers_per_stage": None})
        config = config.model_copy(update={"parallel": parallel})
    stages = plan_stages(config, config.train.recompute)
    return tuple(ModelPart(layers, stage == 0, stage == len(stages) - 1) for stage, layers in enumerate(stages))


def chunk_costs(config: Config, mesh: Mesh) -> list[int]:
    """Floating-point operations of one micro-batch on each (virtual) stage, on all its ranks, recomputation included.

    Raises:
        ConfigError: more stages than layers, or layers_per_stage that do not add up to model.num_layers.
    """
    num_sequences, seq_len = micro_batch_shape(config)
    costs = model_costs(config.model, seq_len, num_sequences, config.train.recompute)
    return [
        sum(costs.layers[part.layers.start : part.layers.stop])
        + (costs.embedding if part.has_embedding else 0)
        + (costs.head_and_loss if part.has_head else 0)
        for part in stage_parts(config, mesh)
    ]


def split_layers(costs: Sequence[int], first_extra: int, last_extra: int, num_stages: int) -> tuple[range, ...]:
    """Cut the layers into consecutive stages of at least one, so that the most expensive stage is cheapest.

    Among the cuts with that highest cost the one with the smallest sum of squares is taken, so that the other stages
    are even too, and among those the one with fewest layers on the first stage, then the second and so on: the
    first stages keep most micro-batches' activations. For interleaved schedules num_stages counts all chunks.

    Args:
        costs: Cost of each layer, whole numbers in any unit.
        first_extra: What the first stage has beside layers: the embedding.
        last_extra: What the last stage has beside layers: the head and the loss.
        num_stages: Into how many stages to cut.

    Raises:
        ConfigError: more stages than layers, or no stage.
    """
    if num_stages < 1 or not costs:
        raise ConfigError(f"{len(costs)} layers on {num_stages} stages: give at least 1 layer and 1 stage")
    if num_stages > len(costs):
        raise ConfigError(
            f"parallel.pp={num_stages} stages cannot share model.num_layers={len(costs)}, since each holds a layer or "
            f"more. Use parallel.pp={len(costs)} or less, or more layers."
        )
    if min(*costs, first_extra, last_extra) < 0:
        raise ValueError(f"costs must be 0 or more: {list(costs)}, {first_extra}, {last_extra}")
    return _best_split(_StageCost((0, *accumulate(costs)), first_extra, last_extra), num_stages)


@dataclass(frozen=True)
class _StageCost:
    """Cost of the stage with layers start .. stop - 1; the ends are where layers begin and end."""

    sums: tuple[int, ...]
    first_extra: int
    last_extra: int

    @property
    def num_layers(self) -> int:
        return len(self.sums) - 1

    def __call__(self, start: int, stop: int) -> int:
        extra = (self.first_extra if start == 0 else 0) + (self.last_extra if stop == self.num_layers else 0)
        return self.sums[stop] - self.sums[start] + extra


@lru_cache(maxsize=64)
def _best_split(stage_cost: _StageCost, num_stages: int) -> tuple[range, ...]:
    """What a plan asks for again with each of its estimates."""
    highest = _lowest_maximum(stage_cost, num_stages)
    return _ranges(_evenest(stage_cost, num_stages, highest))


def _lowest_maximum(stage_cost: _StageCost, num_stages: int) -> int:
    """The cost of the most expensive stage of the best cut."""
    low, high = 0, stage_cost(0, stage_cost.num_layers)
    while low < high:
        middle = (low + high) // 2
        if _fewest_stages(stage_cost, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return low


def _fewest_stages(stage_cost: _StageCost, highest: int) -> float:
    """Into how few stages the layers can be cut with none above `highest`: each takes all that it can."""
    num_layers, start, count = stage_cost.num_layers, 0, 0
    while start < num_layers:
        stops = range(start + 1, num_layers + 1)
        taken = bisect_right(stops, highest, key=partial(stage_cost, start))
        if taken == 0:
            return inf
        start, count = start + taken, count + 1
    return count


def _evenest(stage_cost: _StageCost, num_stages: int, highest: int) -> list[int]:
    """Numbers of layers, no stage above `highest`, by the smallest sum of squares, then the fewest layers first."""
    num_layers = stage_cost.num_layers
    best: dict[int, tuple[int, list[int]]] = {
        start: (cost**2, [num_layers - start])
        for start in range(num_layers)
        if (cost := stage_cost(start, num_layers)) <= highest
    }
    for behind in range(1, num_stages):
        best = {
            start: min(choices)
            for start in range(num_layers - behind)
            if (
                choices := [
                    (cost**2 + best[stop][0], [stop - start, *best[stop][1]])
                    for stop, cost in _affordable(stage_cost, start, num_layers - behind, highest)
                    if stop in best
                ]
            )
        }
    return best[0][1]


def _affordable(stage_cost: _StageCost, start: int, last: int, highest: int) -> Iterator[tuple[int, int]]:
    """Where a stage that begins at `start` may stop, and what it then costs, which grows."""
    for stop in range(start + 1, last + 1):
        cost = stage_cost(start, stop)
        if cost > highest:
            return
        yield stop, cost


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in pairwise([0, *accumulate(counts)]))

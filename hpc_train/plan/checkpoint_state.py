"""Which boxes of a training's state every rank of a mesh holds, all at once: what each rank says of itself in a run.

So it is known who writes what of a checkpoint, and who needs what of it, before any rank is there. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpc_train.config import Config
from hpc_train.plan.box_table import BoxTable
from hpc_train.plan.flat import boxes_of_range, lay_out
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.parameters import UNSPLIT, LocalParameter, ModelPart, TensorSplit, plan_parameters
from hpc_train.plan.stages import stage_parts

ITEM_BYTES = 4
"""All of it is stored in fp32."""
_PREFIXES = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
"""Of weights and of both moments, which AdamW and LAMB have alike."""
NUM_ALIKE = len(_PREFIXES)
"""Runs of the same boxes that a held state consists of."""
_DIMS = 2
"""Most of any parameter."""


@dataclass(frozen=True)
class HeldState:
    """names: of the tensors, all of fp32. boxes: with the rank that holds each."""

    names: tuple[str, ...]
    boxes: BoxTable
    rank: np.ndarray


def held_state(config: Config, mesh: Mesh, *, counted: bool) -> HeldState:
    """Every rank's shards of weights and moments. counted: only what it writes, of what several ranks hold."""
    whole = plan_parameters(config.model, config.data.seq_len, ModelPart.whole(config.model), UNSPLIT)
    number = {plan.name: index for index, plan in enumerate(whole)}
    known: dict[object, np.ndarray] = {}
    columns = []
    for stage, part in enumerate(stage_parts(config, mesh)):
        for tp in range(mesh.tp):
            split = TensorSplit(mesh.tp, tp, config.parallel.sequence_parallel)
            plans = plan_parameters(config.model, config.data.seq_len, part, split)
            plans = tuple(sorted(plans, key=lambda plan: len(plan.shape) < 2))
            # Most stages have the same shapes, so their shards are cut once.
            key = tuple((plan.box.sizes, plan.counted_from if counted else 0) for plan in plans)
            if key not in known:
                known[key] = _shards(plans, mesh.dp, counted)
            place, shard, num_dims = known[key].T[:3]
            offsets, sizes = known[key][:, 3 : 3 + _DIMS], known[key][:, 3 + _DIMS :]
            moved = offsets + np.array([_filled(plan.box.offsets, 0) for plan in plans])[place]
            tensor = np.array([number[plan.name] for plan in plans])[place]
            rank = mesh.rank_of(pp=stage % mesh.pp, tp=tp) + shard * mesh.tp
            columns.append((tensor, rank, num_dims, moved, sizes))
    tensor, rank, num_dims, offsets, sizes = map(np.concatenate, zip(*columns, strict=True))
    times = NUM_ALIKE
    of_prefix = np.concatenate([tensor + index * len(whole) for index in range(times)])
    boxes = BoxTable(
        of_prefix, np.tile(offsets, (times, 1)), np.tile(sizes, (times, 1)), np.tile(num_dims, times)
    )  # fmt: skip
    names = tuple(f"{prefix}.{plan.name}" for prefix in _PREFIXES for plan in whole)
    return HeldState(names, boxes, np.tile(rank, times))


def _shards(plans: Sequence[LocalParameter], dp: int, counted: bool) -> np.ndarray:
    """Rows of (parameter, shard, its dimensions, offsets and sizes within the local parameter)."""
    layout = lay_out([(plan.local_name, plan.box.sizes) for plan in plans], dp)
    rows = []
    for index, (plan, place) in enumerate(zip(plans, layout.parameters, strict=True)):
        skipped = plan.counted_from if counted else 0
        if skipped is None:
            continue
        start = place.start + skipped
        for shard in range(start // layout.shard_elements, dp):
            first, last = layout.shard_range(shard)
            low, high = max(start, first), min(place.stop, last)
            if low >= high:
                break
            for box in boxes_of_range(place.shape, low - place.start, high - place.start):
                filled = (*_filled(box.offsets, 0), *_filled(box.sizes, 1))
                rows.append((index, shard, len(box.sizes), *filled))
    return np.array(rows, dtype=np.int64)


def _filled(numbers: tuple[int, ...], filler: int) -> tuple[int, ...]:
    return (*numbers, *(filler,) * (_DIMS - len(numbers)))

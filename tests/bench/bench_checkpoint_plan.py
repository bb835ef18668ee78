"""Who writes and who reads what of a checkpoint of 175B parameters on 12,288 GPUs: time of the plans, and balance.

The state is that of the recipe gpt-175b (weights and two moments in fp32) on tp 8, pp 8 with 6 virtual stages, dp 192.
It is read by the same mesh, and by it from a checkpoint of another one. The manifest of the checkpoint is written and
read, as rank 0 does and then every rank. Prints JSON.

    python -m tests.bench.bench_checkpoint_plan
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hpc_train.checkpoint.format.manifest import Manifest, StoredTensor, parse_manifest
from hpc_train.checkpoint.format.stored_boxes import StoredBoxes
from hpc_train.checkpoint.loading.needs import stored_table
from hpc_train.checkpoint.stores.location import locate
from hpc_train.config import Config
from hpc_train.config_read import load_config
from hpc_train.plan.checkpoint_flow import written_by
from hpc_train.plan.checkpoint_load import LoadPlan, plan_load
from hpc_train.plan.checkpoint_state import ITEM_BYTES, HeldState, held_state
from hpc_train.plan.mesh import Mesh
from tests.plan.tables import places_of

WORLD, GPUS_PER_NODE = 12288, 8
OTHER = {"pp": 12, "tp": 4, "virtual_stages": 2}


def _timed(act: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Seconds by the clock, and of this process's CPU time, which other work beside does not change as much."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    result = act()
    seconds = {"wall_s": time.perf_counter() - begin, "cpu_s": time.process_time() - begin_cpu}
    return result, {name: round(value, 3) for name, value in seconds.items()}


def _with(config: Config, **parallel: int) -> tuple[Config, Mesh]:
    changed = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})
    return changed, Mesh.fill(WORLD, pp=changed.parallel.pp, tp=changed.parallel.tp)


def _load(saved: HeldState, held: HeldState, mesh: Mesh) -> dict[str, object]:
    item_bytes = np.full(len(saved.rank), ITEM_BYTES)
    plan, seconds = _timed(
        lambda: plan_load(saved.boxes, item_bytes, held.boxes, held.rank, places_of(mesh, GPUS_PER_NODE))
    )
    by_rank = plan.bytes_read
    busiest = int(by_rank.argmax())
    deliveries, own_seconds = _timed(lambda: plan.deliveries(busiest))
    needed = np.bincount(held.rank, weights=held.boxes.num_elements * ITEM_BYTES, minlength=WORLD)
    return {
        "plan": seconds,
        "deliveries of the busiest rank": len(deliveries),
        "listing them": own_seconds,
        "read from the store over the state": round(by_rank.sum() / (saved.boxes.num_elements.sum() * ITEM_BYTES), 4),
        "gaps": len(plan.gaps),
        "most over mean read by a rank": round(by_rank.max() / by_rank.mean(), 3),
        "most over mean needed by a rank": round(needed.max() / needed.mean(), 3),
        "most over mean read by a node": _most_over_mean(by_rank, plan, "node"),
        "most over mean read on a rail": _most_over_mean(by_rank, plan, "rail"),
        "parts": len(plan.parts),
    }


def _manifest(saved: HeldState) -> dict[str, object]:
    manifest = _manifest_of(saved)
    text, write_s = _timed(manifest.to_json)
    read, read_s = _timed(lambda: parse_manifest(text, locate("/there")))
    num_dims = np.array([len(tensor.shape) for tensor in read.tensors.values()])
    (table, _, _), table_s = _timed(lambda: stored_table(read, num_dims, 2))
    assert len(table) == len(saved.rank) and read == manifest
    return {"bytes": len(text), "written": write_s, "read": read_s, "boxes as a table": table_s}


def _manifest_of(saved: HeldState) -> Manifest:
    """As if each rank had written its boxes one behind the other."""
    num_bytes = saved.boxes.num_elements * ITEM_BYTES
    by_rank = np.argsort(saved.rank, kind="stable")
    ends = np.cumsum(num_bytes[by_rank])
    first_of_rank = np.searchsorted(saved.rank[by_rank], saved.rank[by_rank])
    start = np.empty_like(ends)
    start[by_rank] = ends - num_bytes[by_rank] - (ends - num_bytes[by_rank])[first_of_rank]
    files = {f"__{rank}_0.distcp": int(size) for rank, size in enumerate(np.bincount(saved.rank, num_bytes))}
    crc32 = np.random.default_rng(1).integers(1 << 32, size=len(start))
    tensors = {}
    for number, name in enumerate(saved.names):
        rows = np.flatnonzero(saved.boxes.tensor == number)
        num_dims = int(saved.boxes.num_dims[rows[0]])
        offsets, sizes = saved.boxes.offsets[rows, :num_dims], saved.boxes.sizes[rows, :num_dims]
        boxes = StoredBoxes(
            num_dims,
            ITEM_BYTES,
            tuple(files),
            file=saved.rank[rows].tolist(),
            start=start[rows].tolist(),
            crc32=crc32[rows].tolist(),
            offsets=offsets.ravel().tolist(),
            sizes=sizes.ravel().tolist(),
        )
        tensors[name] = StoredTensor("float32", tuple((offsets + sizes).max(axis=0).tolist()), boxes)
    return Manifest(1, {}, tensors, files)


def _most_over_mean(by_rank: np.ndarray, plan: LoadPlan, what: str) -> float:
    total = np.bincount(getattr(plan.places, what), weights=by_rank)
    return round(float(total.max() / total.mean()), 3)


def main() -> None:
    config = load_config("gpt-175b")
    config, mesh = _with(config)
    saved, write_s = _timed(lambda: held_state(config, mesh, counted=True))
    held, need_s = _timed(lambda: held_state(config, mesh, counted=False))
    other = held_state(*_with(config, **OTHER), counted=True)
    writers = written_by(saved, WORLD)
    figures = {
        "mesh": mesh.describe(),
        "boxes written": len(saved.rank),
        "state_bytes": int(writers.sum()),
        "save": {
            "boxes of all ranks": write_s,
            "most over mean written by a rank": round(writers.max() / writers.mean(), 3),
        },
        "manifest": _manifest(saved),
        "needs of all ranks": need_s,
        "load by the same mesh": _load(saved, held, mesh),
        f"load of one saved on {_with(config, **OTHER)[1].describe()}": _load(other, held, mesh),
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

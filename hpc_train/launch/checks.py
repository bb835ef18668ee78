"""What is checked before anything is started or submitted: sizes, data files, an earlier run's settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.cluster.allocation import Allocation, allocation_local
from hpc_train.cluster.fabric import Fabric
from hpc_train.config import Config, ParallelConfig
from hpc_train.config_read import load_config
from hpc_train.errors import ConfigError, DataError
from hpc_train.plan.advice import checked
from hpc_train.plan.axis_bytes import micro_batches_of
from hpc_train.plan.batch import check_batch_sizes
from hpc_train.plan.batch_of_run import check_hdp
from hpc_train.plan.changes import Change, SizesError, largest_divisor, one_of
from hpc_train.plan.memory import check_memory
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.parameters import check_rows, check_split
from hpc_train.plan.place import check_seats
from hpc_train.plan.run import world_mesh
from hpc_train.plan.run_files import CHECKPOINTS_FOLDER, CONFIG_FILE, METRICS_FILE, OUTCOME_FILE, read_json
from hpc_train.plan.schedule_orders import check_micro_batches
from hpc_train.plan.stages import plan_stages


def check_plan(
    config: Config, allocation: Allocation, fabric: Fabric | None, order: str | None = None, others: Sequence[str] = ()
) -> Mesh:
    """The mesh of a run on an allocation, after all that a plan is refused for by its sizes.

    Args:
        order: instead of fabric.order.
        others: Nodes that there are beside the allocation's, where a fabric is known.

    Raises:
        ConfigError: the degrees do not fill the ranks, sizes do not go together, tp groups do not fit into the nodes,
            or the run needs more memory than fabric.gpu_memory_bytes; with changes that are refused for none of it.
    """

    def check(config: Config, allocation: Allocation) -> Mesh:
        mesh = world_mesh(config, allocation)
        check_sizes(config, mesh)
        check_seats(mesh, allocation, fabric, order or config.fabric.order)
        return mesh

    return checked(config, allocation, check, None if fabric is None else others)


def check_ranks(config: Config, num_ranks: int) -> Mesh:
    """The mesh of so many ranks, whose nodes are not known yet.

    Raises:
        ConfigError: as `check_plan`, but for what depends on the nodes.
    """

    def check(config: Config, allocation: Allocation) -> Mesh:
        mesh = world_mesh(config, allocation)
        check_sizes(config, mesh)
        return mesh

    return checked(config, allocation_local(num_ranks, "anywhere", 0), check)


def check_data_files(config: Config) -> None:
    """Refuse a run whose data is not there.

    Raises:
        DataError: a data file is missing or unreadable; all of them are named.
    """
    missing = []
    for source in (*config.data.train, *config.data.heldout):
        for ending in (".bin", ".idx"):
            path = Path(source.prefix + ending)
            if not path.is_file():
                missing.append(f"{path}: no such file")
            elif not os.access(path, os.R_OK):
                missing.append(f"{path}: not readable")
    if missing:
        raise DataError(
            "data files cannot be used (relative paths start at "
            f"{Path.cwd()}):\n  "
            + "\n  ".join(missing)
            + "\nMake them by `hpc-train data build`, or name yours: data.train.0.prefix=PREFIX"
        )


def check_sizes(config: Config, mesh: Mesh) -> None:
    """Batch arithmetic, the model's split over the mesh, tiles, what hdp ranks hold, and memory.

    Raises:
        ConfigError: the batch or tiles do not divide, the model cannot be split so, a pipeline gets too few
            micro-batches, hdp ranks do not hold the longest sequence, or the run needs more memory than
            fabric.gpu_memory_bytes.
    """
    train, parallel = config.train, config.parallel
    check_split(config.model, mesh.tp)
    plan_stages(config, train.recompute)
    if parallel.hdp is not None:
        check_hdp(config, mesh)
    else:
        check_batch_sizes(train.global_batch_size, train.micro_batch_size, mesh.dp)
    check_rows(config, mesh.tp)
    if mesh.dp == 1:
        _check_without_dp(parallel, mesh)
    check_micro_batches(mesh.pp, micro_batches_of(config, mesh), _changes_of_micro_batches(config, mesh))
    if config.fabric.gpu_memory_bytes is not None:
        check_memory(config, mesh, config.fabric.gpu_memory_bytes)


def _check_without_dp(parallel: ParallelConfig, mesh: Mesh) -> None:
    """Refuse settings of data parallel's transfers where there are none."""
    idle = [
        ("gradient_wire", parallel.gradient_wire, "fp32", parallel.gradient_wire != "fp32"),
        ("overlap", "false", True, not parallel.overlap),
        ("early_updates", "true", None, bool(parallel.early_updates)),
    ]
    for name, value, usual, is_set in idle:
        if is_set:
            raise SizesError(
                f"parallel.{name}={value} has no effect with dp=1, where no gradients and no parameters travel.",
                [Change({f"parallel.{name}": usual}), Change(num_ranks=2 * mesh.world_size)],
                "Leave it out, or use dp=2 or more",
            )


def _changes_of_micro_batches(config: Config, mesh: Mesh) -> list[Change]:
    """With which each stage of a pipeline has a micro-batch to work on."""
    train, count = config.train, micro_batches_of(config, mesh)
    fewer = [pp for pp in range(1, min(count, mesh.pp) + 1) if mesh.pp % pp == 0][-2:]
    changes = one_of("parallel.pp", fewer[::-1])
    changes += one_of("train.global_batch_size", [mesh.pp * mesh.dp * train.micro_batch_size])
    sequences = train.global_batch_size // mesh.dp
    smaller = largest_divisor(sequences, min(train.micro_batch_size - 1, sequences // mesh.pp))
    return changes + one_of("train.micro_batch_size", [] if smaller is None else [smaller])


@dataclass(frozen=True)
class Comparison:
    """The folder's earlier configuration beside ours. done: when it ended, if nothing is left to do."""

    changes: tuple[str, ...]
    done: str | None

    @property
    def is_done(self) -> bool:
        return self.done is not None


def compare_with_earlier(run_dir: Path, config: Config) -> Comparison:
    """Lines on what changed since the last attempt in this folder.

    Raises:
        ConfigError: the model changed after the run took steps, so that what it left in the folder would not fit, in
            more than checkpoint.allow_changed_model says.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        return Comparison((), None)
    earlier = load_config(path).model_dump(mode="json")
    changed = list(differing_keys(earlier, config.model_dump(mode="json")))
    meant = tuple(f"model.{name}: " for name in config.checkpoint.allow_changed_model)
    in_model = [line for line in changed if line.startswith("model.") and not line.startswith(meant)]
    if in_model and _has_begun(run_dir):
        raise ConfigError(
            f"the run folder {run_dir} belongs to a run with another model, whose steps and checkpoints do not fit: "
            f"{'; '.join(in_model[:4])}. Give another folder by --run-dir, or the earlier model"
        )
    outcome = read_json(run_dir / OUTCOME_FILE) or {}
    is_done = not changed and outcome.get("outcome") == "done"
    lines = tuple(f"changed since the last attempt: {line}" for line in changed)
    return Comparison(lines, str(outcome.get("time")) if is_done else None)


def _has_begun(run_dir: Path) -> bool:
    """Whether a run took steps in this folder, or saved some."""
    metrics, checkpoints = run_dir / METRICS_FILE, run_dir / CHECKPOINTS_FOLDER
    return (metrics.is_file() and metrics.stat().st_size > 0) or (
        checkpoints.is_dir() and any(not path.name.startswith(".") for path in checkpoints.iterdir())
    )


def differing_keys(earlier: Mapping[str, Any], present: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """`train.steps: 100 -> 200` for each leaf that differs."""
    for key in dict.fromkeys((*earlier, *present)):
        old, new = earlier.get(key), present.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differing_keys(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}: {old!r} -> {new!r}"

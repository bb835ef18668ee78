"""Who writes a checkpoint and who reads it back, in figures: how evenly, and how often each byte is read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpc_train.config import Config
from hpc_train.plan.checkpoint_load import plan_load
from hpc_train.plan.checkpoint_readers import Places
from hpc_train.plan.checkpoint_state import ITEM_BYTES, NUM_ALIKE, HeldState, held_state
from hpc_train.plan.placement import Placement


@dataclass(frozen=True)
class CheckpointFlow:
    """One save, and one load by the same ranks.

    num_bytes: of the whole state. num_writers: ranks that have something to write. most_written, most_read: bytes of
    the fullest rank; *_over_mean, over the mean of all ranks. read_over_state: what leaves the store over what lies
    there. most_read_node_over_mean: of nodes.
    """

    num_bytes: int
    num_writers: int
    most_written: int
    written_over_mean: float
    read_over_state: float
    most_read: int
    read_over_mean: float
    most_read_node_over_mean: float


def plan_checkpoint(config: Config, placement: Placement, rail_of_rank: np.ndarray) -> CheckpointFlow:
    """By the same functions by which a run's ranks find out what they write and read."""
    mesh = placement.mesh
    saved = held_state(config, mesh, counted=True)
    held = held_state(config, mesh, counted=False)
    written = written_by(saved, mesh.world_size)
    places = Places(np.asarray(placement.node_of_rank), rail_of_rank)
    item_bytes = np.full(len(saved.rank), ITEM_BYTES)
    read = plan_load(saved.boxes, item_bytes, held.boxes, held.rank, places, num_alike=NUM_ALIKE).bytes_read
    by_node = np.bincount(places.node, weights=read)
    return CheckpointFlow(
        num_bytes=int(written.sum()),
        num_writers=int(np.count_nonzero(written)),
        most_written=int(written.max()),
        written_over_mean=float(written.max() / written.mean()),
        read_over_state=float(read.sum() / written.sum()),
        most_read=int(read.max()),
        read_over_mean=float(read.max() / read.mean()),
        most_read_node_over_mean=float(by_node.max() / by_node.mean()),
    )


def written_by(saved: HeldState, world_size: int) -> np.ndarray:
    """By rank, the bytes that it writes of what all ranks count."""
    return np.bincount(saved.rank, weights=saved.boxes.num_elements * ITEM_BYTES, minlength=world_size)

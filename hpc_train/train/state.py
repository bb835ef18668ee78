"""What a training run saves and resumes from."""

from __future__ import annotations

from typing import Any

from hpc_train.checkpoint.state import StatePiece
from hpc_train.train.step import Trainer


def state_pieces(trainer: Trainer) -> list[StatePiece]:
    """Views of this rank's shard of weights and moments, as boxes of the global parameters.

    Weights are stored as the fp32 values that the optimizer updates, under `model.<name>`.
    """
    layout = trainer.parameters.layout
    shard = trainer.parameters.group.group_rank
    first, _ = layout.shard_range(shard)
    buffers = {"model": trainer.parameters.master_shard}
    buffers |= {f"optimizer.{name}": moment for name, moment in trainer.optimizer.moments.items()}
    return [
        StatePiece(
            name=f"{prefix}.{piece.name}",
            shape=piece.shape,
            box=piece.box,
            data=buffer[piece.start - first : piece.start - first + piece.box.num_elements],
        )
        for piece in layout.pieces(shard)
        for prefix, buffer in buffers.items()
    ]


def state_bytes(trainer: Trainer) -> int:
    """Size of a checkpoint of all ranks, in bytes: weights and two moments in fp32."""
    return 4 * (1 + len(trainer.optimizer.moments)) * trainer.parameters.layout.num_elements


def plain_values(trainer: Trainer, loader_state: dict[str, Any], skipped_steps: int) -> dict[str, Any]:
    """The rest of the state: small values, the same on every rank."""
    return {
        "num_updates": trainer.optimizer.num_updates,
        "loader": loader_state,
        "skipped_steps": skipped_steps,
    }

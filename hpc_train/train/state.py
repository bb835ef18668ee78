"""What a training run saves and resumes from."""

from __future__ import annotations

from typing import Any

from hpc_train.checkpoint.format.state import StatePiece
from hpc_train.train.step import Trainer


def state_pieces(trainer: Trainer, *, counted: bool = False) -> list[StatePiece]:
    """Views of this rank's shards of weights and moments, as boxes of the global parameters.

    counted: only what this rank stores, since several ranks may hold the same. Weights are stored as the fp32 values
    that the optimizer updates, under `model.<name>`.
    """
    pieces = []
    for index, parameters in enumerate(trainer.parameters):
        first, _ = parameters.layout.shard_range(parameters.group.group_rank)
        buffers = {"model": parameters.master_shard}
        buffers |= {f"optimizer.{name}": moments[index] for name, moments in trainer.optimizer.moments.items()}
        pieces += [
            StatePiece(
                name=f"{prefix}.{piece.name}",
                shape=piece.shape,
                box=piece.box,
                data=buffer[piece.start - first : piece.start - first + piece.box.num_elements],
            )
            for piece in parameters.pieces(counted=counted)
            for prefix, buffer in buffers.items()
        ]
    return pieces


def state_bytes(trainer: Trainer, num_parameters: int) -> int:
    """Size of a checkpoint of all ranks, in bytes: weights and two moments in fp32."""
    return 4 * (1 + len(trainer.optimizer.moments)) * num_parameters


def plain_values(trainer: Trainer, loader_state: dict[str, Any], skipped_steps: int) -> dict[str, Any]:
    """The rest of the state: small values, the same on every rank."""
    return {
        "num_updates": trainer.optimizer.num_updates,
        "loader": loader_state,
        "skipped_steps": skipped_steps,
    }

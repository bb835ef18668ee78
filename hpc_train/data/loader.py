"""The loader: reads one rank's part of each step, and gives it as micro-batches.

Shapes: B sequences of T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from hpc_train.config import DataConfig, TrainConfig
from hpc_train.data.blend import Blend
from hpc_train.data.datasets import Sources
from hpc_train.data.pieces import PieceReader, make_piece_batch, piece_parts
from hpc_train.data.rows import Part, Row, RowReader, copy_part, part_of
from hpc_train.data.step_files import StepFiles
from hpc_train.data.steps import Step, Steps
from hpc_train.plan.batch import MicroBatch
from hpc_train.plan.batch_pieces import PieceBatch
from hpc_train.plan.batch_setup import BatchSetup
from hpc_train.plan.batch_table import BatchTable

if TYPE_CHECKING:
    import torch


@final
@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank. All tensors are (B, T), int64, on the CPU.

    `labels` has the next token of the same document, or -100 where nothing is learnt: at a document's end, in
    padding, and where the loss mask says so. `positions` starts at 0 in each piece. `boundaries` has for each
    row the lengths of its pieces, padding as a piece of its own; their sum is T. `num_tokens` leaves padding
    out. `sequences` has for each row the number of its sequence in the step, the same however ranks share it.
    For a rank that needs none, `tokens` and `labels` are zeros that take no memory.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    boundaries: tuple[tuple[int, ...], ...]
    num_tokens: int
    num_supervised: int
    sequences: tuple[int, ...] = ()


@final
class Loader:
    """Gives each step's plan and rows, the same on every rank, and one rank's micro-batches of it."""

    def __init__(
        self,
        data: DataConfig,
        train: TrainConfig,
        *,
        vocab_size: int,
        dp: int,
        sources: Sources | None = None,
        batches: BatchSetup | None = None,
    ) -> None:
        """Open the sources, unless they are given, and make the blend. batches: as for `Steps`.

        Raises:
            ConfigError: global_batch_size does not divide.
            DataError: as `open_sources`; a source has no tokens.
        """
        self._seq_len = data.seq_len
        self._steps = Steps(data, train, vocab_size=vocab_size, dp=dp, sources=sources, batches=batches)
        files = [StepFiles(self._steps, vocab_size=vocab_size) for _ in range(2)]
        self._training, self._heldout = (RowReader(one, seq_len=data.seq_len) for one in files)
        self._training_pieces, self._heldout_pieces = map(PieceReader, files)

    @property
    def sources(self) -> Sources:
        return self._steps.sources

    @property
    def blend(self) -> Blend:
        return self._steps.blend

    @property
    def has_heldout(self) -> bool:
        return self._steps.has_heldout

    def next_step(self, step: int) -> Step:
        """Take the rows of the next step and plan them; `state` then stands after them."""
        return self._steps.next_step(step)

    def heldout_steps(self, num_steps: int | None = None) -> Iterator[Step]:
        """Give the held-out rows, global_batch_size at a time, each row once at most.

        The rows are the same at every call, for every dp and every seed; padding rows fill the last places.

        Args:
            num_steps: So many at most. None: train.eval_batches.
        """
        return self._steps.heldout_steps(num_steps)

    def micro_batches(self, step: Step, dp_rank: int) -> Iterator[Batch]:
        """Read one rank's part of a step. Steps of training and held-out ones may be read by two threads.

        Raises:
            DataError: a token id is not below vocab_size, or a file was replaced.
        """
        reader = self._heldout if step.heldout else self._training
        rows: dict[int, Row] = {}
        for micro_batch in step.plan.micro_batches(dp_rank):
            wanted = [piece.sequence for piece in micro_batch.sequences if piece.sequence not in rows]
            rows |= reader.read(step, wanted)
            yield _from_rows(micro_batch, rows)
            if all(piece.length == self._seq_len for piece in micro_batch.sequences):
                rows.clear()  # whole rows do not come again

    def piece_batches(self, step: Step, hdp_rank: int) -> list[PieceBatch]:
        """Read one rank's part of a step whose sequences ranks share. Threads and errors as for `micro_batches`."""
        assert isinstance(step.plan, BatchTable)
        reader = self._heldout_pieces if step.heldout else self._training_pieces
        parts = piece_parts(step.plan, hdp_rank)
        values = [np.empty((2, part.micro_batch.num_tokens), np.int32) for part in parts]
        reader.read(step, list(zip(parts, values, strict=True)))
        return [make_piece_batch(hdp_rank, *both) for both in zip(parts, values, strict=True)]

    def state(self) -> dict[str, Any]:
        """Give the position after the last step taken, as JSON; the same on every rank."""
        return self._steps.state()

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Go to a saved position; give what changed in the blend since, where the configuration allows it.

        Raises:
            CheckpointError: the blend changed and data.allow_changed_blend is false.
        """
        return self._steps.restore(state)


def _from_rows(micro_batch: MicroBatch, rows: Mapping[int, Row]) -> Batch:
    part = part_of(micro_batch, rows)
    values = np.empty((2, len(part.sequences), part.length), dtype=np.int32)
    copy_part(micro_batch, rows, values)
    return make_batch(part, values)


def make_batch(part: Part, values: NDArray[np.int32] | None) -> Batch:
    """A micro-batch as tensors of its own. values: tokens and labels, (2, B, T); None where they are not needed."""
    import torch

    if values is None:
        # One element that all places share.
        tokens = labels = torch.zeros((1, 1), dtype=torch.int64).expand(len(part.sequences), part.length)
    else:
        tokens, labels = (torch.from_numpy(array.astype(np.int64)) for array in values)
    return Batch(
        tokens=tokens,
        labels=labels,
        positions=torch.from_numpy(part.positions()),
        boundaries=part.boundaries,
        num_tokens=part.num_tokens,
        num_supervised=part.num_supervised,
        sequences=part.sequences,
    )

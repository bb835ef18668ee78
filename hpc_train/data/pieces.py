"""What ranks get of a step whose sequences they share: pieces of documents, read once for all ranks of a node.

A rank's piece of a sequence is a range of a document's tokens, with one more for the last label. Ranges of neighbours
in a ring touch, and are read as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hpc_train.data.step_files import IGNORED_LABEL, StepFiles, WantedPiece
from hpc_train.data.steps import Step
from hpc_train.plan.batch import MicroBatch, Ring, SequenceSlice
from hpc_train.plan.batch_pieces import PieceBatch
from hpc_train.plan.batch_table import BatchTable


@final
@dataclass(frozen=True)
class PiecePart:
    """One micro-batch of one place as the plan has it; tokens and labels are elsewhere. lengths: of its sequences."""

    micro_batch: MicroBatch
    lengths: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        micro_batch, ring = self.micro_batch, self.micro_batch.ring
        return {
            "pieces": [[piece.sequence, piece.start, piece.length] for piece in micro_batch.sequences],
            "lengths": self.lengths,
            "ring": None if ring is None else [ring.order, list(ring.ranks)],
            "offload_milli": micro_batch.offload_milli,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PiecePart:
        ring = None if values["ring"] is None else Ring(tuple(values["ring"][1]), values["ring"][0])
        pieces = tuple(SequenceSlice(*piece) for piece in values["pieces"])
        return cls(MicroBatch(pieces, ring, values["offload_milli"]), tuple(values["lengths"]))


def piece_parts(table: BatchTable, place: int) -> list[PiecePart]:
    """A place's micro-batches."""
    micro_batches, lengths = table.micro_batches(place), table.lengths_of(place)
    return [PiecePart(*both) for both in zip(micro_batches, lengths, strict=True)]


def make_piece_batch(place: int, part: PiecePart, values: NDArray[np.int32] | None) -> PieceBatch:
    """A micro-batch of its own. values: tokens and labels, (2, num_tokens); None where they are not needed."""
    if values is None:
        tokens = labels = np.zeros(part.micro_batch.num_tokens, np.int64)
    else:
        tokens, labels = values.astype(np.int64)
    return PieceBatch(place, part.micro_batch, part.lengths, tokens, labels)


@final
class PieceReader:
    """Reads pieces of steps. Not for several threads at once."""

    def __init__(self, files: StepFiles) -> None:
        self._files = files

    def read(self, step: Step, wanted: Iterable[tuple[PiecePart, NDArray[np.int32]]]) -> None:
        """Fill micro-batches of a step, each byte of the datasets being read once for all of them.

        wanted: Micro-batches, of any places, and where their tokens and labels go: (2, num_tokens) each.

        Raises:
            DataError: a token id is not below vocab_size, or a file was replaced.
        """
        pieces = []
        for part, target in wanted:
            target[1] = IGNORED_LABEL
            at = 0
            for piece in part.micro_batch.sequences:
                pieces.append(self._want(step, piece, target[:, at : at + piece.length]))
                at += piece.length
        self._files.fill(pieces)

    def _want(self, step: Step, piece: SequenceSlice, target: NDArray[np.int32]) -> WantedPiece:
        """A sequence is a document, or a part of one."""
        source, (whole,) = self._files.pieces(step, piece.sequence)
        return WantedPiece(source, whole.document, whole.start + piece.start, target[0], target[1])

"""The rows of a step with their labels, read from the datasets once, however many places share them.

Shapes: T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hpc_train.data.step_files import IGNORED_LABEL, StepFiles, WantedPiece
from hpc_train.data.steps import Step
from hpc_train.plan.batch import MicroBatch, SequenceSlice

# Padding has no label and is its own piece, so its id is never learnt from nor attended to.
_PADDING_ID = 0


@final
class Row:
    """T tokens and labels, int32; what is not filled is padding. piece_ends: where each piece of a document ends."""

    def __init__(self, seq_len: int) -> None:
        self.tokens: NDArray[np.int32] = np.full(seq_len, _PADDING_ID, dtype=np.int32)
        self.labels: NDArray[np.int32] = np.full(seq_len, IGNORED_LABEL, dtype=np.int32)
        self.piece_ends: list[int] = []

    @property
    def num_tokens(self) -> int:
        return self.piece_ends[-1] if self.piece_ends else 0

    def boundaries(self, start: int, end: int) -> tuple[int, ...]:
        """Lengths of the pieces within [start, end), padding as one of its own."""
        ends = [*self.piece_ends, len(self.tokens)]
        edges = sorted({start, end, *(edge for edge in ends if start < edge < end)})
        return tuple(right - left for left, right in pairwise(edges))

    def position(self, at: int) -> int:
        """The place of a token in its piece."""
        return at - max((end for end in self.piece_ends if end <= at), default=0)


@final
@dataclass(frozen=True)
class Part:
    """One micro-batch of one place, as its rows say; tokens and labels are elsewhere.

    A value a sequence: sequences: its number in the step. boundaries: lengths of its pieces. first_positions: the first
    token's place in its piece. num_tokens leaves padding out.
    """

    length: int
    sequences: tuple[int, ...]
    boundaries: tuple[tuple[int, ...], ...]
    first_positions: tuple[int, ...]
    num_tokens: int
    num_supervised: int

    def to_json(self) -> dict[str, Any]:
        return vars(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Part:
        return cls(
            length=values["length"],
            sequences=tuple(values["sequences"]),
            boundaries=tuple(tuple(lengths) for lengths in values["boundaries"]),
            first_positions=tuple(values["first_positions"]),
            num_tokens=values["num_tokens"],
            num_supervised=values["num_supervised"],
        )

    def positions(self) -> NDArray[np.int64]:
        """(sequences, length): each token's place in its piece."""
        result = np.empty((len(self.sequences), self.length), dtype=np.int64)
        for row, lengths, first in zip(result, self.boundaries, self.first_positions, strict=True):
            at = 0
            for length in lengths:
                row[at : at + length] = np.arange(first, first + length)
                at, first = at + length, 0
        return result


def part_of(micro_batch: MicroBatch, rows: Mapping[int, Row]) -> Part:
    """What is to be known of a micro-batch beside its tokens and labels."""
    pieces = micro_batch.sequences
    length = pieces[0].length
    assert all(piece.length == length for piece in pieces), "the slices of a micro-batch have one length"
    return Part(
        length=length,
        sequences=tuple(piece.sequence for piece in pieces),
        boundaries=tuple(rows[p.sequence].boundaries(p.start, p.start + length) for p in pieces),
        first_positions=tuple(rows[p.sequence].position(p.start) for p in pieces),
        num_tokens=sum(max(0, min(rows[p.sequence].num_tokens - p.start, length)) for p in pieces),
        num_supervised=sum(int((_cut(rows, p, "labels") != IGNORED_LABEL).sum()) for p in pieces),
    )


def copy_part(micro_batch: MicroBatch, rows: Mapping[int, Row], target: NDArray[np.int32]) -> None:
    """Put a micro-batch's tokens and labels into an array of (2, sequences, length)."""
    for at, piece in enumerate(micro_batch.sequences):
        target[0, at] = _cut(rows, piece, "tokens")
        target[1, at] = _cut(rows, piece, "labels")


def _cut(rows: Mapping[int, Row], piece: SequenceSlice, name: str) -> NDArray[np.int32]:
    values: NDArray[np.int32] = getattr(rows[piece.sequence], name)
    return values[piece.start : piece.start + piece.length]


@final
class RowReader:
    """Reads rows of steps. Not for several threads at once."""

    def __init__(self, files: StepFiles, *, seq_len: int) -> None:
        self._files, self._seq_len = files, seq_len

    def read(self, step: Step, sequences: Iterable[int]) -> dict[int, Row]:
        """The rows of these sequences of a step, each read once.

        Raises:
            DataError: a token id is not below vocab_size, or a file was replaced.
        """
        wanted: list[WantedPiece] = []
        rows = {sequence: self._want(step, sequence, wanted) for sequence in dict.fromkeys(sequences)}
        self._files.fill(wanted)
        return rows

    def outline(self, step: Step, sequences: Iterable[int]) -> dict[int, Row]:
        """Rows with their pieces but without tokens and labels: nothing is read."""
        return {sequence: self._want(step, sequence, []) for sequence in dict.fromkeys(sequences)}

    def _want(self, step: Step, sequence: int, wanted: list[WantedPiece]) -> Row:
        """An empty row; what has to be read into it is added to `wanted`."""
        row = Row(self._seq_len)
        if sequence >= len(step.rows):
            return row
        source, pieces = self._files.pieces(step, sequence)
        for piece in pieces:
            begin, end = row.num_tokens, row.num_tokens + piece.length
            wanted.append(
                WantedPiece(source, piece.document, piece.start, row.tokens[begin:end], row.labels[begin:end])
            )
            row.piece_ends.append(end)
        return row

"""The rows of a step with their labels, read from the datasets once, however many places share them.

Shapes: T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hpc_train.data.datasets import OpenSource
from hpc_train.data.index import TokenFile
from hpc_train.data.packing import Packing, Piece
from hpc_train.data.ranges import RangeReader
from hpc_train.data.steps import Step, Steps
from hpc_train.errors import DataError
from hpc_train.plan.batch import MicroBatch, SequenceSlice

IGNORED_LABEL = -100
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


@dataclass
class _Wanted:
    """Ranges of one file, and for each where it goes: row, place in it, piece."""

    file: TokenFile
    ranges: list[tuple[int, int]] = field(default_factory=list)
    targets: list[tuple[Row, int, Piece]] = field(default_factory=list)


@final
class RowReader:
    """Reads rows of steps. Not for several threads at once."""

    def __init__(self, steps: Steps, *, seq_len: int, vocab_size: int) -> None:
        self._steps, self._seq_len, self._vocab_size = steps, seq_len, vocab_size
        self._readers: dict[str, RangeReader] = {}

    def read(self, step: Step, sequences: Iterable[int]) -> dict[int, Row]:
        """The rows of these sequences of a step, each read once.

        Raises:
            DataError: a token id is not below vocab_size, or a file was replaced.
        """
        rows: dict[int, Row] = {}
        tokens: dict[str, _Wanted] = {}
        masks: dict[str, _Wanted] = {}
        for sequence in sequences:
            if sequence not in rows:
                rows[sequence] = self._want(step, sequence, tokens, masks)
        for wanted in tokens.values():
            for (row, at, piece), data in zip(wanted.targets, self._fetch(wanted), strict=True):
                self._place_tokens(row, at, piece, np.frombuffer(data, wanted.file.dtype), wanted.file)
        for wanted in masks.values():
            for (row, at, piece), data in zip(wanted.targets, self._fetch(wanted), strict=True):
                supervised = np.frombuffer(data, wanted.file.dtype)[1:]
                row.labels[at : at + piece.length][: len(supervised)][supervised == 0] = IGNORED_LABEL
        return rows

    def outline(self, step: Step, sequences: Iterable[int]) -> dict[int, Row]:
        """Rows with their pieces but without tokens and labels: nothing is read."""
        return {sequence: self._want(step, sequence, {}, {}) for sequence in dict.fromkeys(sequences)}

    @property
    def bytes_used(self) -> int:
        """How many bytes of the datasets were asked for so far."""
        return sum(reader.bytes_used for reader in self._readers.values())

    def close(self) -> None:
        """Give back all files; what is read later opens them again."""
        for reader in self._readers.values():
            reader.close()

    def _want(self, step: Step, sequence: int, tokens: dict[str, _Wanted], masks: dict[str, _Wanted]) -> Row:
        """An empty row, and what has to be read into it."""
        row = Row(self._seq_len)
        if sequence >= len(step.rows):
            return row
        source, pieces = self._pieces(step, sequence)
        for piece in pieces:
            # One token more than the piece, for the last label, unless the document ends here.
            left = int(source.tokens.document_lengths[piece.document]) - piece.start
            count = min(piece.length + 1, left)
            for file, wanted in ((source.tokens, tokens), (source.mask, masks)):
                if file is not None:
                    entry = wanted.setdefault(file.prefix, _Wanted(file))
                    entry.ranges.append(file.document_range(piece.document, piece.start, count))
                    entry.targets.append((row, row.num_tokens, piece))
            row.piece_ends.append(row.num_tokens + piece.length)
        return row

    def _pieces(self, step: Step, sequence: int) -> tuple[OpenSource, tuple[Piece, ...]]:
        ref = step.rows[sequence]
        packing: Packing
        if step.heldout:
            source, packing = self._steps.sources.heldout[ref.source], self._steps.heldout_packings[ref.source]
        else:
            source, packing = self._steps.sources.train[ref.source], self._steps.blend.packings[ref.source]
        return source, packing.row(ref.epoch, ref.row)

    def _fetch(self, wanted: _Wanted) -> list[memoryview]:
        reader = self._readers.setdefault(wanted.file.prefix, RangeReader(wanted.file))
        return reader.read(wanted.ranges)

    def _place_tokens(self, row: Row, at: int, piece: Piece, ids: NDArray[Any], file: TokenFile) -> None:
        check_ids(ids, file, piece.document, self._vocab_size)
        row.tokens[at : at + piece.length] = ids[: piece.length]
        row.labels[at : at + len(ids) - 1] = ids[1:]


def check_ids(ids: NDArray[Any], file: TokenFile, document: int, vocab_size: int) -> None:
    """Raises DataError: tokens of a document are not below vocab_size."""
    largest, smallest = int(ids.max()), int(ids.min()) if ids.dtype.kind == "i" else 0
    if largest >= vocab_size or smallest < 0:
        worst = smallest if smallest < 0 else largest
        raise DataError(
            f"document {document} of {file.prefix} has the token id {worst}, and model.vocab_size={vocab_size} allows "
            f"0 to {vocab_size - 1}. Raise model.vocab_size, or build the data again."
        )

"""What ranks get of a step whose sequences they share: pieces of documents, read once for all ranks of a node.

A rank's piece of a sequence is a range of a document's tokens, with one more for the last label. Ranges of neighbours
in a ring touch, and are read as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hpc_train.data.datasets import OpenSource
from hpc_train.data.index import TokenFile
from hpc_train.data.packing import Piece
from hpc_train.data.ranges import RangeReader
from hpc_train.data.rows import IGNORED_LABEL, check_ids
from hpc_train.data.steps import Step, Steps
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


@dataclass
class _Wanted:
    """Ranges of one file, and for each the tokens and labels that it goes to."""

    file: TokenFile
    ranges: list[tuple[int, int]] = field(default_factory=list)
    targets: list[tuple[NDArray[np.int32], NDArray[np.int32], int]] = field(default_factory=list)


@final
class PieceReader:
    """Reads pieces of steps. Not for several threads at once."""

    def __init__(self, steps: Steps, *, vocab_size: int) -> None:
        self._steps, self._vocab_size = steps, vocab_size
        self._readers: dict[str, RangeReader] = {}

    def read(self, step: Step, wanted: Iterable[tuple[PiecePart, NDArray[np.int32]]]) -> None:
        """Fill micro-batches of a step, each byte of the datasets being read once for all of them.

        wanted: Micro-batches, of any places, and where their tokens and labels go: (2, num_tokens) each.

        Raises:
            DataError: a token id is not below vocab_size, or a file was replaced.
        """
        tokens: dict[str, _Wanted] = {}
        masks: dict[str, _Wanted] = {}
        for part, target in wanted:
            target[1] = IGNORED_LABEL
            at = 0
            for piece in part.micro_batch.sequences:
                views = (target[0, at : at + piece.length], target[1, at : at + piece.length])
                self._want(step, piece, views, tokens, masks)
                at += piece.length
        for one in tokens.values():
            for (of_tokens, of_labels, document), data in zip(one.targets, self._fetch(one), strict=True):
                ids = np.frombuffer(data, one.file.dtype)
                check_ids(ids, one.file, document, self._vocab_size)
                of_tokens[:] = ids[: len(of_tokens)]
                of_labels[: len(ids) - 1] = ids[1:]
        for one in masks.values():
            for (_, of_labels, _), data in zip(one.targets, self._fetch(one), strict=True):
                supervised = np.frombuffer(data, one.file.dtype)[1:]
                of_labels[: len(supervised)][supervised == 0] = IGNORED_LABEL

    @property
    def bytes_used(self) -> int:
        """How many bytes of the datasets were asked for so far."""
        return sum(reader.bytes_used for reader in self._readers.values())

    def close(self) -> None:
        """Give back all files; what is read later opens them again."""
        for reader in self._readers.values():
            reader.close()

    def _want(
        self,
        step: Step,
        piece: SequenceSlice,
        views: tuple[NDArray[np.int32], NDArray[np.int32]],
        tokens: dict[str, _Wanted],
        masks: dict[str, _Wanted],
    ) -> None:
        source, row = self._row(step, piece.sequence)
        start = row.start + piece.start
        # One token more than the piece, for the last label, unless the document ends here.
        count = min(piece.length + 1, int(source.tokens.document_lengths[row.document]) - start)
        for file, of_files in ((source.tokens, tokens), (source.mask, masks)):
            if file is not None:
                entry = of_files.setdefault(file.prefix, _Wanted(file))
                entry.ranges.append(file.document_range(row.document, start, count))
                entry.targets.append((*views, row.document))

    def _row(self, step: Step, sequence: int) -> tuple[OpenSource, Piece]:
        """The document, or part of one, that a sequence is."""
        ref = step.rows[sequence]
        if step.heldout:
            source, packing = self._steps.sources.heldout[ref.source], self._steps.heldout_packings[ref.source]
        else:
            source, packing = self._steps.sources.train[ref.source], self._steps.blend.packings[ref.source]
        (piece,) = packing.row(ref.epoch, ref.row)
        return source, piece

    def _fetch(self, wanted: _Wanted) -> Sequence[memoryview]:
        reader = self._readers.setdefault(wanted.file.prefix, RangeReader(wanted.file))
        return reader.read(wanted.ranges)

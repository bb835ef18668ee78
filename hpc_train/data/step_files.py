"""The files behind the rows of steps: which pieces of documents a row has, and their tokens and labels.

Whatever is asked for at once is read at once, of each file its ranges side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hpc_train.data.datasets import OpenSource
from hpc_train.data.index import TokenFile
from hpc_train.data.packing import Packing, Piece
from hpc_train.data.ranges import RangeReader
from hpc_train.data.steps import Step, Steps
from hpc_train.errors import DataError

IGNORED_LABEL = -100


@final
@dataclass(frozen=True)
class WantedPiece:
    """A part of a document, and where its tokens and labels go: arrays of its length, and no label is there yet."""

    source: OpenSource
    document: int
    start: int
    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]

    def range_in(self, file: TokenFile) -> tuple[int, int]:
        """One token more than the piece, for the last label, unless the document ends here."""
        left = int(self.source.tokens.document_lengths[self.document]) - self.start
        return file.document_range(self.document, self.start, min(len(self.tokens) + 1, left))


@final
class StepFiles:
    """Reads pieces. Not for several threads at once."""

    def __init__(self, steps: Steps, *, vocab_size: int) -> None:
        self._steps, self._vocab_size = steps, vocab_size
        self._readers: dict[str, RangeReader] = {}

    def pieces(self, step: Step, sequence: int) -> tuple[OpenSource, tuple[Piece, ...]]:
        """What a row of a step is made of."""
        ref = step.rows[sequence]
        packing: Packing
        if step.heldout:
            source, packing = self._steps.sources.heldout[ref.source], self._steps.heldout_packings[ref.source]
        else:
            source, packing = self._steps.sources.train[ref.source], self._steps.blend.packings[ref.source]
        return source, packing.row(ref.epoch, ref.row)

    def fill(self, wanted: Iterable[WantedPiece]) -> None:
        """Read pieces to where they go. Labels stay ignored where a mask says so.

        Raises:
            DataError: a token id is not below vocab_size, or a file was replaced or shortened.
        """
        wanted = list(wanted)
        for piece, ids in self._read(wanted, lambda source: source.tokens):
            _check_ids(ids, piece, self._vocab_size)
            piece.tokens[:] = ids[: len(piece.tokens)]
            piece.labels[: len(ids) - 1] = ids[1:]
        for piece, mask in self._read(wanted, lambda source: source.mask):
            piece.labels[: len(mask) - 1][mask[1:] == 0] = IGNORED_LABEL

    @property
    def bytes_used(self) -> int:
        """How many bytes of the datasets were asked for so far."""
        return sum(reader.bytes_used for reader in self._readers.values())

    def close(self) -> None:
        """Give back all files; what is read later opens them again."""
        for reader in self._readers.values():
            reader.close()

    def _read(
        self, wanted: Iterable[WantedPiece], file_of: Callable[[OpenSource], TokenFile | None]
    ) -> Iterator[tuple[WantedPiece, NDArray[Any]]]:
        """The pieces whose source has such a file, with what it says of them."""
        by_file: dict[str, tuple[TokenFile, list[WantedPiece]]] = {}
        for piece in wanted:
            file = file_of(piece.source)
            if file is not None:
                by_file.setdefault(file.prefix, (file, []))[1].append(piece)
        for file, pieces in by_file.values():
            file.check_index()
            reader = self._readers.setdefault(file.prefix, RangeReader(file))
            found = reader.read([piece.range_in(file) for piece in pieces])
            for piece, data in zip(pieces, found, strict=True):
                yield piece, np.frombuffer(data, file.dtype)


def _check_ids(ids: NDArray[Any], piece: WantedPiece, vocab_size: int) -> None:
    largest, smallest = int(ids.max()), int(ids.min()) if ids.dtype.kind == "i" else 0
    if largest >= vocab_size or smallest < 0:
        worst = smallest if smallest < 0 else largest
        raise DataError(
            f"document {piece.document} of {piece.source.tokens.prefix} has the token id {worst}, and "
            f"model.vocab_size={vocab_size} allows 0 to {vocab_size - 1}. Raise model.vocab_size, or build the data "
            "again."
        )

"""Pack documents into rows of seq_len tokens, in an order that depends on (seed, epoch, source) alone.

A row is seq_len inputs and seq_len labels. The label of an input is the next token of the same document, also
where a row ends inside the document; the last token of a document has no label. So nothing is seq_len + 1
long, and a document that is cut in two loses no label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final, get_args

import numpy as np
from numpy.typing import NDArray

from hpc_train.errors import ConfigError, DataError

LongDocuments = Literal["split", "truncate", "drop"]

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# What is put in order: keeps the order of rows independent of the order of documents.
_DOCUMENTS, _ROWS = 1, 2


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, start + length) of a document, as part of a row."""

    document: int
    start: int
    length: int


@final
@dataclass(frozen=True)
class PackingCounts:
    """What one epoch does to a source's documents and tokens."""

    documents: int
    tokens: int
    empty_documents: int
    longer_documents: int  # than seq_len
    dropped_documents: int
    dropped_tokens: int  # cut off, or of dropped documents


@final
class Packing:
    """Rows of one source.

    `split` cuts the shuffled stream of documents every seq_len tokens, so no token is lost or comes twice;
    the last row of an epoch may be short. `truncate` keeps the first seq_len tokens of each document and
    `drop` leaves out longer ones; both then fill rows with whole documents, opening a new row when the next
    one does not fit. Rows are shuffled too: those of a long document do not come one after another.

    Without packing each row has one document, whole where it has at most seq_len tokens; `split` cuts longer ones into
    rows of seq_len and one with the rest.
    """

    def __init__(
        self,
        lengths: NDArray[Any],
        seq_len: int,
        policy: LongDocuments = "split",
        *,
        is_packed: bool = True,
        seed: int = 0,
        source_index: int = 0,
        first_document: int = 0,
        name: str = "the dataset",
    ) -> None:
        """Take the lengths of documents first_document, first_document + 1, ...

        Raises:
            ConfigError: seq_len < 1 or an unknown policy.
            DataError: no token is left to train on.
        """
        if seq_len < 1:
            raise ConfigError(f"seq_len={seq_len}: a row needs at least 1 token.")
        if policy not in get_args(LongDocuments):
            raise ConfigError(f"long_documents={policy!r} is unknown. Use {', '.join(get_args(LongDocuments))}.")
        self.seq_len, self.policy, self.seed, self.source_index = seq_len, policy, seed, source_index
        self.is_packed = is_packed
        self._first_document = first_document
        full = np.asarray(lengths).astype(np.int64)
        kept = full
        if policy == "truncate":
            kept = np.minimum(full, seq_len)
        elif policy == "drop":
            kept = np.where(full > seq_len, 0, full)
        self._lengths = kept
        self._num_parts = int((-(-kept // seq_len)).sum())
        longer = int((full > seq_len).sum())
        self.counts = PackingCounts(
            documents=len(full),
            tokens=int(full.sum()),
            empty_documents=int((full == 0).sum()),
            longer_documents=longer,
            dropped_documents=longer if policy == "drop" else 0,
            dropped_tokens=int((full - kept).sum()),
        )
        if not int(kept.sum()):
            raise DataError(
                f"{name} has no token to train on: {len(full)} documents, {self.counts.tokens} tokens, "
                f"{self.counts.empty_documents} empty, {self.counts.dropped_documents} dropped as longer "
                "than "
                f"seq_len={seq_len}. Give more data, or long_documents=split."
            )
        # The label of a row's last token is the next one of its document, also where the row ends inside it.
        self.has_labels = bool(((kept > 0) & (full > 1)).any())
        # An epoch's order takes 24 bytes a document and row, so only one is kept.
        self._epoch: _Epoch | None = None
        self._num_rows: dict[int, int] = {}

    def rows_in_epoch(self, epoch: int) -> int:
        """Rows that an epoch has; for packed `truncate` and `drop` it depends on the order of that epoch."""
        if not self.is_packed:
            return self._num_parts
        if self.policy == "split":
            return -(-(self.counts.tokens - self.counts.dropped_tokens) // self.seq_len)
        if epoch not in self._num_rows:
            self._num_rows[epoch] = self._enter(epoch).num_rows
        return self._num_rows[epoch]

    def row_length(self, epoch: int, row_index: int) -> int:
        """Tokens of a row."""
        start, end = self._bounds(epoch, row_index)
        return end - start

    def row(self, epoch: int, row_index: int) -> tuple[Piece, ...]:
        """Give the pieces of a row, in order; together at least 1 and at most seq_len tokens."""
        start, end = self._bounds(epoch, row_index)
        state = self._enter(epoch)
        pieces = []
        at = int(np.searchsorted(state.ends, start, side="right"))
        while start < end:
            stop = min(end, int(state.ends[at]))
            document = int(state.order[at])
            begin = int(self._lengths[document]) - (int(state.ends[at]) - start)
            pieces.append(Piece(self._first_document + document, begin, stop - start))
            start, at = stop, at + 1
        return tuple(pieces)

    def _bounds(self, epoch: int, row_index: int) -> tuple[int, int]:
        """Where a row lies in the epoch's stream of tokens."""
        state = self._enter(epoch)
        if not 0 <= row_index < state.num_rows:
            raise IndexError(f"row {row_index} of epoch {epoch}, which has {state.num_rows} rows")
        return state.row_bounds(int(state.row_order[row_index]))

    def _enter(self, epoch: int) -> _Epoch:
        if epoch < 0:
            raise ValueError(f"epoch {epoch} is negative")
        if self._epoch is None or self._epoch.epoch != epoch:
            self._epoch = None  # frees the old order before the new one is made
            self._epoch = self._prepare(epoch)
        return self._epoch

    def _prepare(self, epoch: int) -> _Epoch:
        order = shuffled(len(self._lengths), self.seed, epoch, self.source_index, _DOCUMENTS)
        lengths = self._lengths[order]
        filled = lengths > 0
        order, lengths = order[filled], lengths[filled]
        ends = np.cumsum(lengths)
        starts = None
        if not self.is_packed:
            starts = _parts(ends - lengths, lengths, self.seq_len)
        elif self.policy != "split":
            starts = _next_fit(ends - lengths, ends, self.seq_len)
        num_rows = len(starts) if starts is not None else -(-int(ends[-1]) // self.seq_len)
        row_order = shuffled(num_rows, self.seed, epoch, self.source_index, _ROWS)
        return _Epoch(epoch, self.seq_len, order, ends, starts, row_order)


@final
class _Epoch:
    """One epoch's stream of tokens and where its rows lie in it."""

    def __init__(
        self,
        epoch: int,
        seq_len: int,
        order: NDArray[np.int64],
        ends: NDArray[np.int64],
        starts: NDArray[np.int64] | None,
        row_order: NDArray[np.int64],
    ) -> None:
        self.epoch, self._seq_len = epoch, seq_len
        self.order, self.ends, self._starts, self.row_order = order, ends, starts, row_order
        self.num_rows = len(row_order)

    def row_bounds(self, row: int) -> tuple[int, int]:
        total = int(self.ends[-1])
        if self._starts is None:
            return row * self._seq_len, min((row + 1) * self._seq_len, total)
        return int(self._starts[row]), int(self._starts[row + 1]) if row + 1 < self.num_rows else total


def _next_fit(starts: NDArray[np.int64], ends: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """Give the stream offset at which each row begins, when a document that does not fit opens a new one."""
    # For every document: the first one that would not share its row, if it began one.
    following = np.searchsorted(ends, starts + seq_len, side="right").tolist()
    rows, at = [], 0
    while at < len(following):
        rows.append(at)
        at = following[at]
    return starts[np.array(rows, dtype=np.int64)]


def _parts(starts: NDArray[np.int64], lengths: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """Give the stream offset of each row where documents do not share rows: every seq_len tokens of each document."""
    counts = -(-lengths // seq_len)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts, counts) + (np.arange(len(before)) - before) * seq_len


def shuffled(count: int, *key: int) -> NDArray[np.int64]:
    """Give 0 .. count - 1 in an order that depends on the key alone, on every CPU and every NumPy version."""
    # The finaliser is a bijection and the counter takes different values, so no two hashes are equal; a
    # stable sort is still asked for, as the order must not depend on that.
    return np.argsort(_hash_range(count, key), kind="stable")


def _hash_range(count: int, key: tuple[int, ...]) -> NDArray[np.uint64]:
    """Hash (key, i) for i in 0 .. count - 1.

    Source: the finaliser of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014, with the constants of Stafford's variant 13.
    """
    base = 0
    for word in key:
        base = _mix((base + _GOLDEN + (word & _MASK64)) & _MASK64)
    x = np.arange(count, dtype=np.uint64)
    x *= np.uint64(_GOLDEN)
    x += np.uint64(base)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)

"""The loader: opens the sources of a run, takes each step's rows from the blend, and gives micro-batches.

Every rank holds the same blend and plans the same step, then reads only the rows that its part of the plan
names. Shapes: B sequences of T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from hpc_train.config import DataConfig, SourceConfig, TrainConfig
from hpc_train.data.blend import Blend, RowRef, SourceIdentity
from hpc_train.data.index import TokenFile, bin_path, index_path, loss_mask_prefix, sidecar_path
from hpc_train.data.packing import Packing
from hpc_train.data.sidecar import Sidecar, read_sidecar, sha256_of_file
from hpc_train.errors import DataError
from hpc_train.plan.batch import BatchPlan, MicroBatch, check_batch_sizes, plan_batch_static

if TYPE_CHECKING:
    import torch

IGNORED_LABEL = -100
# Padding has no label and is its own piece, so its id is never learnt from nor attended to.
_PADDING_ID = 0
# The same held-out rows whatever the seed of the run.
_HELDOUT_SEED = 0
# Without a sidecar a dataset up to this size is read once at the start to find its largest id (assumed: some
# seconds); a larger one is checked row by row as it is read.
_SCAN_LIMIT_BYTES = 2 << 30


@final
@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank. All tensors are (B, T), int64, on the CPU.

    `labels` has the next token of the same document, or -100 where nothing is learnt: at a document's end, in
    padding, and where the loss mask says so. `positions` starts at 0 in each piece. `boundaries` has for each
    row the lengths of its pieces, padding as a piece of its own; their sum is T. `num_tokens` leaves padding
    out. `sequences` has for each row the number of its sequence in the step, the same however ranks share it.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    boundaries: tuple[tuple[int, ...], ...]
    num_tokens: int
    num_supervised: int
    sequences: tuple[int, ...] = ()


@final
@dataclass(frozen=True)
class Step:
    """What one step trains on: the plan, and the rows that its sequence numbers mean. Rows past the end are
    padding."""

    plan: BatchPlan
    rows: tuple[RowRef, ...]
    heldout: bool = False


@final
@dataclass(frozen=True)
class OpenSource:
    """One dataset, checked, and the documents [first_document, first_document + num_documents) of it."""

    tokens: TokenFile
    mask: TokenFile | None
    sidecar: Sidecar | None
    idx_sha256: str
    weight: float
    first_document: int
    num_documents: int

    @property
    def lengths(self) -> NDArray[Any]:
        return self.tokens.document_lengths[self.first_document : self.first_document + self.num_documents]

    def identity(self) -> SourceIdentity:
        return SourceIdentity(
            self.tokens.prefix,
            self.idx_sha256,
            self.first_document,
            self.num_documents,
            self.mask is not None,
        )


@final
@dataclass(frozen=True)
class Sources:
    """All datasets of a run."""

    train: tuple[OpenSource, ...]
    heldout: tuple[OpenSource, ...]


def open_sources(data: DataConfig, vocab_size: int) -> Sources:
    """Open and check every dataset of a run.

    Raises:
        DataError: files are missing, damaged or do not belong together; an id is not below vocab_size; a mask
            has other lengths; a held-out share takes all documents or none.
    """
    train: list[OpenSource] = []
    heldout: list[OpenSource] = []
    for config in data.train:
        source = _open_source(config, vocab_size)
        if data.heldout_fraction:
            source, tail = _split_tail(source, data.heldout_fraction)
            heldout.append(tail)
        train.append(source)
    heldout += [_open_source(config, vocab_size) for config in data.heldout]
    for source in (*train, *heldout):
        _check_has_labels(source)
    _check_same_tokenizer([*train, *heldout])
    return Sources(tuple(train), tuple(heldout))


def _check_has_labels(source: OpenSource) -> None:
    """A document of one token has no next token, so nothing can be learnt from a dataset of such documents."""
    if not bool((source.lengths >= 2).any()):
        raise DataError(
            f"{source.tokens.prefix} has no token to train on: {source.num_documents} documents with "
            f"{int(source.lengths.sum())} tokens, and none of two or more. Build it from other sources."
        )


def _check_same_tokenizer(sources: Sequence[OpenSource]) -> None:
    """Ids of two tokenizers do not mean the same. Datasets without a sidecar of ours say nothing about theirs."""
    known = [source for source in sources if source.sidecar is not None]
    for source in known[1:]:
        first, other = known[0].sidecar, source.sidecar
        assert first is not None and other is not None
        if (first.tokenizer_sha256, first.vocab_size) != (other.tokenizer_sha256, other.vocab_size):
            raise DataError(
                f"{known[0].tokens.prefix} was made with the tokenizer {first.tokenizer} of {first.vocab_size} tokens, "
                f"{source.tokens.prefix} with {other.tokenizer} of {other.vocab_size}: the same id means "
                "different text. Build all datasets of a run with one tokenizer."
            )


def _open_source(config: SourceConfig, vocab_size: int) -> OpenSource:
    tokens = TokenFile.open(config.prefix)
    sidecar = read_sidecar(config.prefix)
    if sidecar is not None:
        _check_sidecar(tokens, sidecar)
    _check_vocabulary(tokens, sidecar, vocab_size)
    return OpenSource(
        tokens=tokens,
        mask=_open_mask(tokens) if config.loss_mask else None,
        sidecar=sidecar,
        idx_sha256=sidecar.idx_sha256 if sidecar else sha256_of_file(index_path(config.prefix)),
        weight=config.weight,
        first_document=0,
        num_documents=tokens.num_documents,
    )


def _check_sidecar(tokens: TokenFile, sidecar: Sidecar) -> None:
    said = (sidecar.num_documents, sidecar.num_tokens, sidecar.bin_bytes)
    found = (tokens.num_documents, tokens.num_tokens, tokens.num_bytes)
    if said != found:
        raise DataError(
            f"{sidecar_path(tokens.prefix)} describes another build: it says {said[0]} documents, "
            f"{said[1]} tokens, "
            f"{said[2]} bytes, and the files have {found[0]}, {found[1]}, {found[2]}. Copy all files of "
            "the dataset "
            "together, or build it again."
        )


def _check_vocabulary(tokens: TokenFile, sidecar: Sidecar | None, vocab_size: int) -> None:
    largest = sidecar.max_token_id if sidecar else _largest_id(tokens, vocab_size)
    if largest is not None and largest >= vocab_size:
        needed = sidecar.vocab_size if sidecar else largest + 1
        made_with = f" with the tokenizer {sidecar.tokenizer} of {sidecar.vocab_size} tokens" if sidecar else ""
        raise DataError(
            f"{bin_path(tokens.prefix)}, made{made_with}, has the token id {largest}, and "
            f"model.vocab_size={vocab_size} "
            f"allows ids up to {vocab_size - 1}. Use model.vocab_size={needed} or more, or build the data "
            "again."
        )


def _largest_id(tokens: TokenFile, vocab_size: int) -> int | None:
    if int(np.iinfo(tokens.dtype).max) < vocab_size or tokens.num_bytes > _SCAN_LIMIT_BYTES:
        return None
    return max((int(block.max()) for block in tokens.blocks()), default=None)


def _open_mask(tokens: TokenFile) -> TokenFile:
    prefix = loss_mask_prefix(tokens.prefix)
    if not index_path(prefix).exists():
        raise DataError(
            f"{index_path(prefix)} does not exist, and the configuration asks for the loss mask of "
            f"{tokens.prefix}. "
            "Build the data with --loss-mask FIELD, or set loss_mask: false."
        )
    mask = TokenFile.open(prefix)
    if not np.array_equal(mask.document_lengths, tokens.document_lengths):
        raise DataError(
            f"{prefix} does not belong to {tokens.prefix}: {mask.num_documents} documents of "
            f"{mask.num_tokens} tokens against "
            f"{tokens.num_documents} of {tokens.num_tokens}, or other lengths. Build both again with "
            "--loss-mask."
        )
    return mask


def _split_tail(source: OpenSource, fraction: float) -> tuple[OpenSource, OpenSource]:
    total = source.num_documents
    count = round(fraction * total)
    if not 0 < count < total:
        raise DataError(
            f"heldout_fraction={fraction} of the {total} documents of {source.tokens.prefix} is {count} "
            "documents, which "
            "leaves one side empty. Choose another fraction, or name a held-out dataset in data.heldout."
        )
    first = total - count

    def part(first_document: int, num_documents: int) -> OpenSource:
        return OpenSource(
            source.tokens,
            source.mask,
            source.sidecar,
            source.idx_sha256,
            source.weight,
            first_document,
            num_documents,
        )

    return part(0, first), part(first, count)


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
    ) -> None:
        """Open the sources, unless they are given, and make the blend.

        Raises:
            ConfigError: global_batch_size does not divide.
            DataError: as `open_sources`; a source has no tokens.
        """
        check_batch_sizes(train.global_batch_size, train.micro_batch_size, dp)
        self._data, self._train, self._vocab_size, self._dp = data, train, vocab_size, dp
        self.sources = open_sources(data, vocab_size) if sources is None else sources
        self.blend = self._make_blend(self.sources.train, train.seed)
        self._heldout_packings = self._pack(self.sources.heldout, _HELDOUT_SEED)

    @property
    def has_heldout(self) -> bool:
        return bool(self.sources.heldout)

    def next_step(self, step: int) -> Step:
        """Take the rows of the next step and plan them; `state` then stands after them."""
        rows = self.blend.take(self._train.global_batch_size)
        plan = plan_batch_static(step, len(rows), self._data.seq_len, self._train.micro_batch_size, self._dp)
        return Step(plan, tuple(rows))

    def heldout_steps(self, num_steps: int | None = None) -> Iterator[Step]:
        """Give the held-out rows, global_batch_size at a time, each row once at most.

        The rows are the same at every call, for every dp and every seed; padding rows fill the last places.

        Args:
            num_steps: So many at most. None: train.eval_batches.
        """
        if not self.has_heldout:
            return
        size = self._train.global_batch_size
        wanted = size * (self._train.eval_batches if num_steps is None else num_steps)
        rows = self._blend(self.sources.heldout, self._heldout_packings, epochs=1).take(wanted)
        unit = self._dp * self._train.micro_batch_size
        for number, first in enumerate(range(0, len(rows), size)):
            some = tuple(rows[first : first + size])
            padded = -(-len(some) // unit) * unit
            plan = plan_batch_static(number, padded, self._data.seq_len, self._train.micro_batch_size, self._dp)
            yield Step(plan, some, heldout=True)

    def micro_batches(self, step: Step, dp_rank: int) -> Iterator[Batch]:
        """Read one rank's part of a step.

        Raises:
            DataError: a token id is not below vocab_size, or a file was replaced.
        """
        rows: dict[int, _Row] = {}
        for micro_batch in step.plan.ranks[dp_rank]:
            for piece in micro_batch.sequences:
                if piece.sequence not in rows:
                    rows[piece.sequence] = self._read_row(step, piece.sequence)
            yield _to_batch(micro_batch, rows)
            if all(piece.length == self._data.seq_len for piece in micro_batch.sequences):
                rows.clear()  # whole rows do not come again

    def state(self) -> dict[str, Any]:
        """Give the position after the last step taken, as JSON; the same on every rank."""
        return self.blend.state()

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Go to a saved position; give what changed in the blend since, where the configuration allows it.

        Raises:
            CheckpointError: the blend changed and data.allow_changed_blend is false.
        """
        return self.blend.restore(state, self._data.allow_changed_blend)

    def _make_blend(self, sources: Sequence[OpenSource], seed: int) -> Blend:
        return self._blend(sources, self._pack(sources, seed))

    def _pack(self, sources: Sequence[OpenSource], seed: int) -> list[Packing]:
        return [
            Packing(
                source.lengths,
                self._data.seq_len,
                self._data.long_documents,
                seed=seed,
                source_index=number,
                first_document=source.first_document,
                name=source.tokens.prefix,
            )
            for number, source in enumerate(sources)
        ]

    def _blend(self, sources: Sequence[OpenSource], packings: Sequence[Packing], epochs: int | None = None) -> Blend:
        weights = [source.weight for source in sources]
        return Blend(packings, weights, [source.identity() for source in sources], epochs=epochs)

    def _read_row(self, step: Step, sequence: int) -> _Row:
        row = _Row.padding(self._data.seq_len)
        if sequence >= len(step.rows):
            return row
        ref = step.rows[sequence]
        sources = self.sources.heldout if step.heldout else self.sources.train
        packings = self._heldout_packings if step.heldout else self.blend.packings
        source, packing = sources[ref.source], packings[ref.source]
        for piece in packing.row(ref.epoch, ref.row):
            # One token more than the piece, for the last label, unless the document ends here.
            left = int(source.tokens.document_lengths[piece.document]) - piece.start
            count = min(piece.length + 1, left)
            ids = source.tokens.read_document(piece.document, piece.start, count).astype(np.int64)
            self._check_ids(ids, source, piece.document)
            labels = np.full(piece.length, IGNORED_LABEL, dtype=np.int64)
            labels[: count - 1] = ids[1:]
            if source.mask is not None:
                supervised = source.mask.read_document(piece.document, piece.start, count)[1:]
                labels[: count - 1][supervised == 0] = IGNORED_LABEL
            row.append(ids[: piece.length], labels)
        return row

    def _check_ids(self, ids: NDArray[np.int64], source: OpenSource, document: int) -> None:
        if int(ids.max()) >= self._vocab_size or int(ids.min()) < 0:
            worst = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise DataError(
                f"document {document} of {source.tokens.prefix} has the token id {worst}, and "
                "model.vocab_size="
                f"{self._vocab_size} allows 0 to {self._vocab_size - 1}. Raise model.vocab_size, or build "
                "the data again."
            )


@final
class _Row:
    """seq_len tokens; what is not filled is padding."""

    def __init__(self, tokens: NDArray[np.int64], labels: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        self.tokens, self.labels, self.positions = tokens, labels, positions
        self.piece_ends: list[int] = []

    @classmethod
    def padding(cls, seq_len: int) -> _Row:
        return cls(
            np.full(seq_len, _PADDING_ID, dtype=np.int64),
            np.full(seq_len, IGNORED_LABEL, dtype=np.int64),
            np.arange(seq_len, dtype=np.int64),
        )

    @property
    def num_tokens(self) -> int:
        return self.piece_ends[-1] if self.piece_ends else 0

    def append(self, tokens: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        start, end = self.num_tokens, self.num_tokens + len(tokens)
        self.tokens[start:end], self.labels[start:end] = tokens, labels
        self.positions[start:end] = np.arange(end - start)
        self.positions[end:] = np.arange(len(self.positions) - end)
        self.piece_ends.append(end)

    def boundaries(self, start: int, end: int) -> tuple[int, ...]:
        """Lengths of the pieces within [start, end)."""
        ends = [*self.piece_ends, len(self.tokens)]
        edges = sorted({start, end, *(edge for edge in ends if start < edge < end)})
        return tuple(right - left for left, right in pairwise(edges))


def _to_batch(micro_batch: MicroBatch, rows: Mapping[int, _Row]) -> Batch:
    import torch

    pieces = micro_batch.sequences
    length = pieces[0].length
    assert all(piece.length == length for piece in pieces), "the slices of a micro-batch have one length"

    def stacked(name: str) -> torch.Tensor:
        return torch.from_numpy(np.stack([getattr(rows[p.sequence], name)[p.start : p.start + length] for p in pieces]))

    labels = stacked("labels")
    return Batch(
        tokens=stacked("tokens"),
        labels=labels,
        positions=stacked("positions"),
        boundaries=tuple(rows[p.sequence].boundaries(p.start, p.start + length) for p in pieces),
        num_tokens=sum(max(0, min(rows[p.sequence].num_tokens - p.start, length)) for p in pieces),
        num_supervised=int((labels != IGNORED_LABEL).sum()),
        sequences=tuple(piece.sequence for piece in pieces),
    )

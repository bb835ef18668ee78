"""The datasets of a run, opened and checked before anything is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from hpc_train.data.blend import SourceIdentity
from hpc_train.data.index import TokenFile, bin_path, index_path, loss_mask_prefix, sidecar_path
from hpc_train.data.sidecar import Sidecar, read_sidecar, sha256_of_file
from hpc_train.errors import DataError

if TYPE_CHECKING:
    from hpc_train.config import DataConfig, SourceConfig

# Without a sidecar a dataset up to this size is read once at the start to find its largest id (assumed: some
# seconds); a larger one is checked row by row as it is read.
_SCAN_LIMIT_BYTES = 2 << 30


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


def open_sources(data: DataConfig, vocab_size: int, *, by_index: bool = False) -> Sources:
    """Open and check every dataset of a run.

    by_index: no token is read, so that ids are checked only where a sidecar tells the largest.

    Raises:
        DataError: files are missing, damaged or do not belong together; an id is not below vocab_size; a mask
            has other lengths; a held-out share takes all documents or none.
    """
    train: list[OpenSource] = []
    heldout: list[OpenSource] = []
    for config in data.train:
        source = _open_source(config, vocab_size, by_index)
        if data.heldout_fraction:
            source, tail = _split_tail(source, data.heldout_fraction)
            heldout.append(tail)
        train.append(source)
    heldout += [_open_source(config, vocab_size, by_index) for config in data.heldout]
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


def _open_source(config: SourceConfig, vocab_size: int, by_index: bool) -> OpenSource:
    tokens = TokenFile.open(config.prefix)
    sidecar = read_sidecar(config.prefix)
    if sidecar is not None:
        _check_sidecar(tokens, sidecar)
    if sidecar is not None or not by_index:
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
    largest = max((int(block.max()) for block in tokens.blocks()), default=None)
    tokens.unmap()
    return largest


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

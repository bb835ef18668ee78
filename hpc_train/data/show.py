"""Describe a dataset and check it: lengths with their tail, entropy, first text, sizes and hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.data.build import entropy_nats
from hpc_train.data.index import TokenFile, bin_path, index_path, loss_mask_prefix, sidecar_path
from hpc_train.data.sidecar import Sidecar, read_sidecar, sha256_of_file
from hpc_train.data.tokenizer import load_tokenizer
from hpc_train.errors import DataError

_PERCENTILES = (50, 90, 99, 99.9)
_NUM_FIRST_TOKENS = 64
# Tokens are counted without being asked up to this size (assumed: about a second).
_COUNT_LIMIT_BYTES = 256 << 20


def show(prefix: str | Path, verify: bool = False) -> dict[str, Any]:
    """Describe a dataset, as JSON.

    Args:
        verify: Read every byte: hash the index, look at every token, compare with PREFIX.json.

    Raises:
        DataError: files are missing or damaged. With verify: any check fails.
    """
    tokens = TokenFile.open(prefix)
    sidecar = read_sidecar(prefix)
    counts = _count_tokens(tokens) if verify or tokens.num_bytes <= _COUNT_LIMIT_BYTES else None
    checks = _checks(tokens, sidecar, counts, verify)
    if failed := [check for check in checks if not check["ok"]]:
        raise DataError(
            f"{prefix} is not what it says: "
            + "; ".join(f"{check['check']}: {check['detail']}" for check in failed)
            + ". Copy all files of the dataset together, or build it again."
        )
    entropy = sidecar.unigram_entropy_nats if sidecar else None
    if counts is not None:
        entropy = entropy_nats(counts) if tokens.num_tokens else None
    return {
        "prefix": str(prefix),
        "dtype": tokens.dtype.name,
        "num_documents": tokens.num_documents,
        "num_sequences": tokens.num_sequences,
        "num_tokens": tokens.num_tokens,
        "bin_bytes": tokens.num_bytes,
        "lengths": _describe_lengths(tokens.document_lengths),
        "histogram": _histogram(tokens.document_lengths),
        "max_token_id": _largest(counts) if counts is not None else sidecar.max_token_id if sidecar else None,
        "unigram_entropy_nats": entropy,
        "num_supervised_tokens": sidecar.num_supervised_tokens if sidecar else None,
        "tokenizer": sidecar.tokenizer if sidecar else None,
        "vocab_size": sidecar.vocab_size if sidecar else None,
        "skipped": sidecar.skipped if sidecar else None,
        "first_tokens": _first_tokens(tokens),
        "first_text": _first_text(tokens, sidecar),
        "checks": checks,
    }


def _count_tokens(tokens: TokenFile) -> NDArray[np.int64]:
    counts = np.zeros(1, dtype=np.int64)
    for block in tokens.blocks():
        if int(block.min()) < 0:
            raise DataError(f"{bin_path(tokens.prefix)} has the negative token id {int(block.min())}. Build it again.")
        found = np.bincount(block.astype(np.int64))
        if len(found) > len(counts):
            counts = np.concatenate((counts, np.zeros(len(found) - len(counts), np.int64)))
        counts[: len(found)] += found
    return counts


def _largest(counts: NDArray[np.int64]) -> int | None:
    used = np.flatnonzero(counts)
    return int(used[-1]) if used.size else None


def _checks(
    tokens: TokenFile, sidecar: Sidecar | None, counts: NDArray[np.int64] | None, verify: bool
) -> list[dict[str, Any]]:
    checks: list[dict[str, Any]] = []

    def check(name: str, expected: Any, found: Any) -> None:
        same = expected == found
        checks.append(
            {
                "check": name,
                "ok": same,
                "detail": f"{found}" if same else f"{expected} expected, {found} found",
            }
        )

    # `TokenFile.open` has compared the two sizes already.
    check("size of .bin by the index", tokens.num_bytes, bin_path(tokens.prefix).stat().st_size)
    if sidecar is not None:
        name = sidecar_path(tokens.prefix).name
        check(f"documents by {name}", sidecar.num_documents, tokens.num_documents)
        check(f"tokens by {name}", sidecar.num_tokens, tokens.num_tokens)
        check(f"size of .bin by {name}", sidecar.bin_bytes, tokens.num_bytes)
        if counts is not None:
            check(f"largest token id by {name}", sidecar.max_token_id, _largest(counts))
        if verify:
            check(f"hash of .idx by {name}", sidecar.idx_sha256, sha256_of_file(index_path(tokens.prefix)))
    mask_prefix = loss_mask_prefix(tokens.prefix)
    if index_path(mask_prefix).exists():
        mask = TokenFile.open(mask_prefix)
        same = bool(np.array_equal(mask.document_lengths, tokens.document_lengths))
        check("lengths of the loss mask", True, same)
        if verify and sidecar is not None and sidecar.num_supervised_tokens is not None:
            marked = sum(int(np.count_nonzero(block)) for block in mask.blocks())
            check("supervised tokens", sidecar.num_supervised_tokens, marked)
    return checks


def _describe_lengths(lengths: NDArray[Any]) -> dict[str, Any]:
    if not len(lengths):
        return {"min": None, "mean": None, "max": None, "empty": 0}
    values = np.percentile(lengths, _PERCENTILES, method="inverted_cdf")
    return {
        "min": int(lengths.min()),
        "mean": round(float(lengths.mean()), 1),
        **{f"p{percent:g}": int(value) for percent, value in zip(_PERCENTILES, values, strict=True)},
        "max": int(lengths.max()),
        "empty": int((lengths == 0).sum()),
    }


def _histogram(lengths: NDArray[Any]) -> list[dict[str, int]]:
    """Documents and tokens by length, in bins [2^k, 2^(k+1)): a long tail is few documents, many tokens."""
    full = lengths[lengths > 0].astype(np.int64)
    if not full.size:
        return []
    # frexp is exact, which a logarithm at a power of two is not.
    bins = np.frexp(full.astype(np.float64))[1] - 1
    documents = np.bincount(bins)
    tokens = np.zeros(len(documents), dtype=np.int64)
    np.add.at(tokens, bins, full)
    return [
        {"from": 1 << k, "documents": int(documents[k]), "tokens": int(tokens[k])}
        for k in range(len(documents))
        if documents[k]
    ]


def _first_tokens(tokens: TokenFile) -> list[int]:
    filled = np.flatnonzero(tokens.document_lengths[:1000])
    if not filled.size:
        return []
    document = int(filled[0])
    count = min(_NUM_FIRST_TOKENS, int(tokens.document_lengths[document]))
    return [int(token) for token in tokens.read_document(document, 0, count)]


def _first_text(tokens: TokenFile, sidecar: Sidecar | None) -> str | None:
    if sidecar is None:
        return None
    spec: str | Path = "byte"
    if sidecar.tokenizer_file is not None:
        spec = Path(tokens.prefix).parent / sidecar.tokenizer_file
        if not spec.exists():
            return None
    return load_tokenizer(spec).decode(_first_tokens(tokens))

"""Lengths of a step's sequences for the benchmarks of batch planners: long tails like those of real corpora."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

KI, MI = 1 << 10, 1 << 20
STEP_TOKENS = 32 * MI

# Token shares in percent by the bins' lower edges; a bin X holds lengths in [X, 2X), the first one all below 4K.
# Cited: ByteScale (arXiv 2502.21231), read off a figure; of 512K and more only the sum, 5.3 %, its parts are assumed.
GITHUB_SHARES = {
    256: 34.0, 4 * KI: 10.4, 8 * KI: 9.5, 16 * KI: 10.7, 32 * KI: 10.2, 64 * KI: 8.8, 128 * KI: 6.4, 256 * KI: 4.5,
    512 * KI: 2.3, MI: 1.7, 2 * MI: 1.3,
}  # fmt: skip


def tailed_lengths(seed: int, total: int = STEP_TOKENS) -> NDArray[np.int64]:
    """A lognormal bulk, four fifths of it below 4K, and 0.05 % of the sequences from 192K to 2M, the largest 2M."""
    rng = np.random.default_rng(seed)
    bulk = np.exp(rng.normal(math.log(4096) - 0.8416, 1.0, total // 512)).clip(16, 128 * KI).astype(np.int64)
    ends = np.cumsum(bulk)
    num_long = 1
    while True:
        long = _stratified(rng, num_long)
        num_bulk = int(np.searchsorted(ends, total - int(long.sum()), side="right"))
        if num_long >= round(0.0005 * (num_bulk + num_long)):
            break
        num_long += 1
    left = total - int(long.sum()) - int(ends[num_bulk - 1])
    lengths = np.concatenate([bulk[:num_bulk], long, [left] if left else []]).astype(np.int64)
    rng.shuffle(lengths)
    return lengths


def _stratified(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Log-uniform between 192K and 2M, one in each of `count` equal parts, the last at its upper end."""
    at = (np.arange(count) + rng.random(count)) / count
    at[-1] = 1.0
    return np.round(192 * KI * (2 * MI / (192 * KI)) ** at).astype(np.int64)


def github_steps(num_steps: int, context: int, total: int = STEP_TOKENS, seed: int = 0) -> list[NDArray[np.int64]]:
    """Steps of a stream of documents with ByteScale's GitHub shares, log-uniform within a bin.

    The shares hold for the stream; a single step has no or one document of the last bins. Documents longer than the
    context are cut at it.
    """
    rng = np.random.default_rng(seed)
    documents = []
    for edge, share in GITHUB_SHARES.items():
        upper = 4 * KI if edge < KI else 2 * edge
        wanted = share / 100 * total * num_steps
        count = round(wanted * math.log(upper / edge) / (upper - edge))
        at = (np.arange(count) + rng.random(count)) / max(1, count)
        documents.append(np.round(edge * (upper / edge) ** at).astype(np.int64))
    stream = np.concatenate(documents)
    rng.shuffle(stream)
    pieces = -(-stream // context)
    lengths = np.full(int(pieces.sum()), context)
    lengths[np.cumsum(pieces) - 1] = stream - (pieces - 1) * context
    borders = np.searchsorted(np.cumsum(lengths), np.arange(1, num_steps) * total)
    return np.split(lengths, borders)

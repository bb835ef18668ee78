"""Documents for the benchmarks of hybrid data parallelism: C++ headers with their natural tail, as words."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

VOCAB = 256


def headers() -> Path:
    """Those that come with torch."""
    return Path(str(files("torch"))) / "include"


def documents(root: Path, num_tokens: int, context: int) -> list[bytes]:
    """.h files as tokens in the order of a hash of their names, longer ones cut at the context, until enough.

    A token is a word, a sign or a space between them, about as long as those of tokenizers made for code.
    """
    token = re.compile(rb"\w+|[^\w\s]|\s+")
    found: list[bytes] = []
    left = num_tokens
    paths = sorted(root.rglob("*.h"), key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest())
    for path in paths:
        text = bytes(zlib.crc32(word) & 0xFF for word in token.findall(path.read_bytes()))
        for start in range(0, len(text), context):
            if left <= 0:
                return found
            found.append(text[start : start + min(context, left)])
            left -= len(found[-1])
    return found


def sampled(texts: Sequence[bytes], every: int) -> list[bytes]:
    """Each so many-th by length, in the order of all: their lengths are spread as those of all are."""
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    return [texts[index] for index in sorted(by_length[every // 2 :: every])]


def whole_batches(texts: Sequence[bytes]) -> list[Any]:
    """Each document as a micro-batch of its own, the labels its next tokens."""
    import torch

    from tests.train.trainers import TestBatch

    found = []
    for index, text in enumerate(texts):
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[None]
        labels = torch.cat([tokens[:, 1:], tokens.new_full((1, 1), -100)], dim=1)
        found.append(TestBatch(tokens, labels, torch.arange(len(text))[None], ((len(text),),), (index,)))
    return found

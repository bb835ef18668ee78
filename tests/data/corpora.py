"""Small datasets and loaders for tests: documents of numbers that name their place."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.config import DataConfig, SourceConfig, TrainConfig
from hpc_train.data.index_writer import TokenFileWriter
from hpc_train.data.loader import Batch, Loader

VOCAB = 1000


def write(prefix: Path, documents: Iterable[Sequence[int]], dtype: Any = np.uint16) -> str:
    with TokenFileWriter(prefix, dtype, overwrite=True) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish()
    return str(prefix)


def numbered(lengths: Sequence[int], first: int = 1) -> list[list[int]]:
    """Documents of consecutive ids, so that each id names its place."""
    ends = np.cumsum([0, *lengths]) + first
    return [list(range(start, end)) for start, end in itertools.pairwise(ends)]


def configs(
    prefixes: Sequence[str], *, steps: int = 6, size: int = 8, micro: int = 1, seq_len: int = 16, **data: Any
) -> tuple[DataConfig, TrainConfig]:
    """Of a run over these datasets."""
    sources = tuple(SourceConfig(prefix=prefix, weight=1.0 + number) for number, prefix in enumerate(prefixes))
    train = TrainConfig(steps=steps, global_batch_size=size, micro_batch_size=micro, seed=7, eval_batches=2)
    return DataConfig(seq_len=seq_len, train=sources, **data), train


def own_batches(data: DataConfig, train: TrainConfig, dp: int, dp_rank: int) -> list[list[Batch]]:
    """What a rank that reads by itself gets, step by step."""
    loader = Loader(data, train, vocab_size=VOCAB, dp=dp)
    return [list(loader.micro_batches(loader.next_step(step), dp_rank)) for step in range(1, train.steps + 1)]


def values(batch: Batch) -> tuple[Any, ...]:
    """A batch as values that compare."""
    tensors = (batch.tokens.tolist(), batch.labels.tolist(), batch.positions.tolist())
    return (*tensors, batch.boundaries, batch.num_tokens, batch.num_supervised, batch.sequences)

"""Tokenise a corpus's work items, in this process or in workers, in order.

Nothing here writes: `build` appends the results.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hpc_train.data.index import dtype_for_vocab
from hpc_train.data.sources import Batch, Document, RowFields, read_batch
from hpc_train.data.tokenizer import Tokenizer, without_surrogates
from hpc_train.errors import DataError

# A worker must not take itself for a rank of the MPI program that its parent is part of.
_MPI_VARIABLES = ("PMI_", "PMIX_", "PMI2_", "OMPI_", "MPI_LOCAL", "MPIR_", "PALS_", "MV2_", "HYDI_", "HYDRA_")
# Of NumPy and of the tokenizers library, which would start a thread for each core in each worker.
_THREAD_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")

# Work items in flight for each worker: one in work, the others ready, so no worker waits for the parent.
_ITEMS_PER_WORKER = 3


@final
@dataclass(frozen=True)
class Encoded:
    """The documents of one work item, their tokens one after another."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    mask: NDArray[np.uint8] | None
    # 0: training, 1: held out
    sides: NDArray[np.int8]
    skipped: Counter[str]
    read_bytes: int


@final
@dataclass(frozen=True)
class Work:
    """Everything that turns a work item into tokens."""

    tokenizer: Tokenizer
    fields: RowFields
    heldout_fraction: float

    def encode(self, batch: Batch) -> Encoded:
        documents, skipped = read_batch(batch, self.fields)
        ids: list[int] = []
        lengths, masks, sides = [], [], []
        for document in documents:
            tokens, mask = self._encode_document(document)
            ids.extend(tokens)
            lengths.append(len(tokens))
            sides.append(is_heldout(document.text, self.heldout_fraction))
            masks.append(mask)
        return Encoded(
            tokens=np.array(ids, dtype=dtype_for_vocab(self.tokenizer.vocab_size)),
            lengths=np.array(lengths, dtype=np.int64),
            mask=None if self.fields.loss_mask is None else np.concatenate([np.zeros(0, np.uint8), *masks]),
            sides=np.array(sides, dtype=np.int8),
            skipped=skipped,
            read_bytes=batch.read_bytes,
        )

    def _encode_document(self, document: Document) -> tuple[list[int], NDArray[np.uint8]]:
        text, spans = without_surrogates(document.text), document.supervised
        if spans is None or isinstance(spans, bool):
            tokens = self.tokenizer.encode(text)
            mask = np.full(len(tokens) + 1, bool(spans), dtype=np.uint8)
        else:
            tokens, offsets = self.tokenizer.encode_with_offsets(text)
            mask = supervised_tokens(len(text), spans, offsets)
        return [*tokens, self.tokenizer.eod_id], mask


def supervised_tokens(
    num_characters: int, spans: Iterable[tuple[int, int]], offsets: Sequence[tuple[int, int]]
) -> NDArray[np.uint8]:
    """Mark the tokens that have a character in one of the spans, and the end-of-document token after them."""
    inside = np.zeros(num_characters + 1, dtype=np.int64)
    for start, end in spans:
        inside[start:end] = 1
    before = np.concatenate(([0], np.cumsum(inside)))
    edges = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    # A token without characters of its own (a normaliser's) goes with the character at its place.
    ends = np.maximum(edges[:, 1], edges[:, 0] + 1)
    mask = before[ends] > before[edges[:, 0]]
    last = num_characters > 0 and bool(inside[num_characters - 1])
    return np.append(mask, last).astype(np.uint8)


def is_heldout(text: str, fraction: float) -> bool:
    """Choose documents by their content, so that copies of one text lie on the same side."""
    if not fraction:
        return False
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < int(fraction * 2**64)


_worker_work: Work | None = None


def _start_worker(work: Work) -> None:
    """Set up a worker: signals to the job are for the parent, and a worker ends when its parent does."""
    global _worker_work
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    _worker_work = work


def _end_with_parent(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _encode_in_worker(batch: Batch) -> Encoded:
    assert _worker_work is not None, "the pool's initializer ran"
    return _worker_work.encode(batch)


def encode_all(
    work: Work, items: Iterable[Batch], num_workers: int, env: Mapping[str, str] | None
) -> Iterator[Encoded]:
    """Encode all work items, in order, with few of them in memory at once."""
    if num_workers == 1:
        yield from map(work.encode, items)
        return
    # spawn: a fork would copy the locks and handles of threads, of MPI and of HDFS clients.
    context = multiprocessing.get_context("spawn")
    with worker_environment(env):
        pool = ProcessPoolExecutor(num_workers, context, _start_worker, (work,))
        pending: deque[Future[Encoded]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(_encode_in_worker, item))
                if len(pending) >= _ITEMS_PER_WORKER * num_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                f"one of {num_workers} workers died; most often the machine or the job's memory limit had "
                "no memory left. "
                "Give fewer --workers, or ask for more memory."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def worker_environment(env: Mapping[str, str] | None) -> Iterator[None]:
    """Processes that are started meanwhile see no launcher's variables, and use one thread each.

    Only the environment that children inherit changes; what this process sees in Python stays.

    Args:
        env: This process's environment. None: nothing changes.
    """
    if env is None:
        yield
        return
    hidden = [name for name in env if name.startswith(_MPI_VARIABLES)]
    for name in hidden:
        os.unsetenv(name)
    for name in _THREAD_COUNTS:
        os.putenv(name, "1")
    try:
        yield
    finally:
        for name in (*hidden, *_THREAD_COUNTS):
            if name in env:
                os.putenv(name, env[name])
            else:
                os.unsetenv(name)

"""A thread that reads a rank's part of a checkpoint, a few chunks ahead of who takes them, and checks every byte."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from hpc_train.checkpoint.files.boxes import BoxFiles
from hpc_train.checkpoint.format.stored_boxes import StoredBox
from hpc_train.checkpoint.stores.bounded import wait_in
from hpc_train.checkpoint.stores.caller import Bound
from hpc_train.checkpoint.stores.cause import StoreError, is_unread
from hpc_train.checkpoint.stores.location import Location
from hpc_train.cluster.agent_wait import LOOK_S
from hpc_train.errors import CheckpointError
from hpc_train.plan.checkpoint_load import Chunk

_CHUNKS_AHEAD = 2
"""Read and not taken yet: one hides the store behind the network, two an uneven store (assumed)."""


class ChunkReader:
    """Reads chunks in the order given, and stops at the first failure, which it keeps; it never raises.

    A chunk may be used before the rest of its box is read, but nothing counts as loaded before `end` has returned and
    all ranks have compared what it left: `problem`, what is wrong with the checkpoint; `failure`, why nothing more can
    be said of it; `runs`, (row of the stored box, elements before, bytes, CRC-32) of what was read of each box that
    other ranks read as well.
    """

    def __init__(
        self,
        folder: Location,
        chunks: Sequence[Chunk],
        stored: Sequence[tuple[int, StoredBox, int]],
        folder_of: Mapping[str, Location],
        bound: Bound,
    ) -> None:
        """stored: by chunk the row of its box, the box, and the bytes of an element. folder_of: of files elsewhere.

        bound: of a store in which nothing moves while bytes are waited for; it is a failure.
        """
        self.problem: str | None = None
        self.failure: BaseException | None = None
        self.runs: list[tuple[int, int, int, int]] = []
        self._folder, self._folder_of = folder, folder_of
        self._work = list(zip(chunks, stored, strict=True))
        self._ready: queue.Queue[np.ndarray | None] = queue.Queue(_CHUNKS_AHEAD)
        self._taken = 0
        self._is_over = self._is_left = False
        places = list(dict.fromkeys([folder, *self._folder_of.values()]))
        self._wait = lambda: wait_in(places, f"reading {folder.name}", bound)
        self._thread = threading.Thread(target=self._read_all, name="checkpoint-reader", daemon=True)
        self._thread.start()

    def take(self, index: int) -> np.ndarray | None:
        """The bytes of a chunk by its place in the list, which must not fall; None once reading has failed."""
        data = None
        while self._taken <= index and not self._is_over:
            data = self._next()
            self._taken += 1
            self._is_over = data is None
        return data

    def end(self) -> None:
        """Read what is left, and return when the thread has ended, or hangs."""
        self.take(len(self._work) - 1)
        if not self._is_left:
            self._thread.join()

    def _next(self) -> np.ndarray | None:
        waiting = self._wait()
        while True:
            try:
                return self._ready.get(timeout=LOOK_S)
            except queue.Empty:
                try:
                    waiting.look()
                except StoreError as problem:
                    self.failure, self._is_left = problem, True
                    return None

    def _read_all(self) -> None:
        try:
            with BoxFiles(self._folder, self._folder_of) as files:
                for chunk, (row, stored, item_bytes) in self._work:
                    start, num_bytes = chunk.skipped * item_bytes, chunk.box.num_elements * item_bytes
                    data = files.read(stored.file, stored.start + start, num_bytes)
                    self._check(row, stored, chunk.skipped, data, item_bytes)
                    self._ready.put(data)
        except CheckpointError as error:
            if is_unread(error):
                self.failure = error
            else:
                self.problem = str(error)
        except BaseException as error:  # whoever waits for chunks has to hear of its end
            self.failure = error
        if self.problem is not None or self.failure is not None:
            self._ready.put(None)

    def _check(self, row: int, stored: StoredBox, skipped: int, data: np.ndarray, item_bytes: int) -> None:
        """Add a chunk to the checksum of its run, which is the whole box where no other rank reads of it."""
        start, num_bytes, crc32 = skipped * item_bytes, 0, 0
        if self.runs and self.runs[-1][0] == row and sum(self.runs[-1][1:3]) == start:
            _, start, num_bytes, crc32 = self.runs.pop()
        crc32 = zlib.crc32(data.data, crc32)
        num_bytes += data.nbytes
        if num_bytes < stored.num_bytes:
            self.runs.append((row, start, num_bytes, crc32))
        elif crc32 != stored.crc32:
            raise CheckpointError(damage(self._folder_of.get(stored.file, self._folder), stored))


def damage(folder: Location, stored: StoredBox) -> str:
    return f"{folder / stored.file} is damaged: the checksum of the bytes at {stored.start} does not match"

"""Read pieces of a dataset's files, each byte once and hardly more of the disk than asked for.

Mapped files are read around each page that is touched, 128 KiB as a rule: five times what a row of 32 KiB has. Here the
kernel is told that nothing is read ahead, then all pieces of a step at once, so that it fetches them side by side.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from hpc_train.data.index import TokenFile, bin_path, open_for_reading, retry_stale
from hpc_train.errors import DataError

# derived: pieces with a gap below a page have no page between them, so reading the gap costs none.
_MERGED_GAP_BYTES = 4096


@final
class RangeReader:
    """Reads byte ranges of PREFIX.bin. Each process that reads opens the file for itself.

    bytes_used: how many bytes were asked for so far.
    """

    def __init__(self, tokens: TokenFile) -> None:
        self._path, self._prefix, self._num_bytes = bin_path(tokens.prefix), tokens.prefix, tokens.num_bytes
        self._descriptor = -1
        self._pid = -1
        self._close: Callable[[], object] = _nothing
        self._lock = threading.Lock()
        self.bytes_used = 0

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of each (offset, number of bytes), in the order asked.

        Raises:
            DataError: the file was replaced, shortened or cannot be read.
        """
        descriptor = self._open()
        runs = merge_ranges(ranges)
        self.bytes_used += sum(count for _, count in ranges)
        if len(runs) > 1:
            for offset, num_bytes, _ in runs:
                os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)
        result: list[memoryview] = [memoryview(b"")] * len(ranges)
        for offset, num_bytes, members in runs:
            buffer = memoryview(self._read_all(offset, num_bytes))
            for index in members:
                first, count = ranges[index]
                result[index] = buffer[first - offset : first - offset + count]
        return result

    def close(self) -> None:
        """Safe to call twice; what is read later opens the file again."""
        with self._lock:
            if self._pid == os.getpid():
                self._close()
            self._descriptor, self._pid = -1, -1

    def _read_all(self, offset: int, num_bytes: int) -> bytearray:
        buffer = bytearray(num_bytes)
        view, at = memoryview(buffer), offset
        while view:
            count = retry_stale(partial(self._read_some, view, at), self._path, time.sleep)
            if not count:
                raise DataError(
                    f"{self._path} ends at byte {at}, and had {self._num_bytes} bytes when it was checked: it was "
                    "shortened under a running job. Write new data under a new name."
                )
            view, at = view[count:], at + count
        return buffer

    def _read_some(self, view: memoryview, at: int) -> int:
        try:
            return os.preadv(self._open(), [view], at)
        except OSError:
            self.close()  # a handle that is stale is of no use; the next try opens the file by its path
            raise

    def _open(self) -> int:
        with self._lock:
            if self._descriptor < 0 or self._pid != os.getpid():
                self._descriptor = retry_stale(self._open_once, self._prefix, time.sleep)
                self._pid = os.getpid()
                self._close = weakref.finalize(self, os.close, self._descriptor)
            return self._descriptor

    def _open_once(self) -> int:
        with open_for_reading(self._path) as stream:
            num_bytes = os.fstat(stream.fileno()).st_size
            if num_bytes != self._num_bytes:
                raise DataError(
                    f"{self._path} had {self._num_bytes} bytes when it was checked and has {num_bytes} now: it was "
                    "replaced under a running job. Write new data under a new name."
                )
            descriptor = os.dup(stream.fileno())
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor


def _nothing() -> None:
    pass


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, list[int]]]:
    """Ranges that overlap or nearly touch as one: (offset, number of bytes, indices of what is in it), by offset.

    Empty ranges are in none.
    """
    order = sorted((index for index, (_, count) in enumerate(ranges) if count), key=lambda index: ranges[index][0])
    runs: list[tuple[int, int, list[int]]] = []
    for index in order:
        offset, count = ranges[index]
        if runs and offset - (runs[-1][0] + runs[-1][1]) < _MERGED_GAP_BYTES:
            first, num_bytes, members = runs[-1]
            members.append(index)
            runs[-1] = (first, max(num_bytes, offset + count - first), members)
        else:
            runs.append((offset, count, [index]))
    return runs

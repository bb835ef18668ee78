"""Counts how often anything below some folders is opened, by whomever on this machine (inotify)."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_IN_OPEN = 0x20
_IN_Q_OVERFLOW = 0x4000
_HEAD = struct.Struct("iIII")


class OpenCounter:
    """While it is entered: opens of files and folders below `folders`, as names to counts.

    Node namespaces share the kernel, so opens by the jobs of a cluster on this machine are seen.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.counts: Counter[str] = Counter()
        self.overflowed = False
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self._names: dict[int, str] = {}
        for top in folders:
            for folder in [top, *(path for path in top.rglob("*") if path.is_dir() and not path.is_symlink())]:
                watch = self._libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _IN_OPEN)
                if watch < 0:
                    raise OSError(ctypes.get_errno(), f"inotify_add_watch {folder} (see fs.inotify.max_user_watches)")
                self._names[watch] = str(folder)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __enter__(self) -> OpenCounter:
        self._drain()  # making the watches has opened the folders
        self.counts.clear()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._drain()
        os.close(self._descriptor)

    def _read(self) -> None:
        while not self._stop.is_set():
            if select.select([self._descriptor], [], [], 0.1)[0]:
                self._drain()

    def _drain(self) -> None:
        while True:
            try:
                data = os.read(self._descriptor, 1 << 18)
            except BlockingIOError:
                return
            while data:
                watch, mask, _, length = _HEAD.unpack_from(data)
                name = data[_HEAD.size : _HEAD.size + length].rstrip(b"\0").decode()
                data = data[_HEAD.size + length :]
                self.overflowed |= bool(mask & _IN_Q_OVERFLOW)
                # An open of a folder is told twice, by itself and by the one above: counted once, by itself.
                if mask & _IN_OPEN and not (name and mask & 0x40000000):
                    self.counts[f"{self._names[watch]}/{name}"] += 1

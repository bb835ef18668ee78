"""Counts how often anything below some folders is opened, by whomever on this machine (fanotify, as root)."""

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

# linux/fanotify.h
_FAN_CLOEXEC, _FAN_NONBLOCK, _FAN_UNLIMITED_QUEUE, _FAN_UNLIMITED_MARKS = 0x1, 0x2, 0x10, 0x20
_FAN_MARK_ADD = 0x1
_FAN_OPEN, _FAN_Q_OVERFLOW, _FAN_EVENT_ON_CHILD, _FAN_ONDIR = 0x20, 0x4000, 0x08000000, 0x40000000
_AT_FDCWD = -100
_EVENT = struct.Struct("IBBHQii")  # length, version, reserved, length of the head, mask, descriptor, process


class OpenCounter:
    """While it is entered: opens of files and folders below `folders`, as names to counts.

    Node namespaces share the kernel, so opens by the jobs of a cluster on this machine are seen. Unlike inotify,
    which makes one of two like events that follow each other unread, fanotify tells processes apart: two nodes that
    open a file in the same moment count as two. Opens by one process that follow each other unread count as one.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.counts: Counter[str] = Counter()
        self.overflowed = False
        libc = ctypes.CDLL(None, use_errno=True)
        flags = _FAN_CLOEXEC | _FAN_NONBLOCK | _FAN_UNLIMITED_QUEUE | _FAN_UNLIMITED_MARKS
        self._descriptor = libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "fanotify_init (it needs CAP_SYS_ADMIN)")
        mask = ctypes.c_uint64(_FAN_OPEN | _FAN_EVENT_ON_CHILD | _FAN_ONDIR)
        for top in folders:
            for folder in [top, *(path for path in top.rglob("*") if path.is_dir() and not path.is_symlink())]:
                if libc.fanotify_mark(self._descriptor, _FAN_MARK_ADD, mask, _AT_FDCWD, os.fsencode(folder)):
                    raise OSError(ctypes.get_errno(), f"fanotify_mark {folder}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __enter__(self) -> OpenCounter:
        self._drain()  # making the marks has opened the folders
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
                data = os.read(self._descriptor, 1 << 12)  # each event read opens a descriptor here
            except BlockingIOError:
                return
            while data:
                length, _, _, _, mask, opened, _ = _EVENT.unpack_from(data)
                data = data[length:]
                if mask & _FAN_Q_OVERFLOW:
                    self.overflowed = True
                    continue
                self.counts[os.readlink(f"/proc/self/fd/{opened}")] += 1
                os.close(opened)

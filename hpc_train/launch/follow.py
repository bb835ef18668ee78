"""Copying lines as they are written: from a launcher's pipe to several places, and from growing files."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

_RANK_OF_LINE = re.compile(rb"^\S+ \S+ r(\d+) \| ")
POLL_S = 0.2
"""How often a growing file is looked at; a network file system tells nobody that it grew."""


def rank_of_line(line: bytes) -> int | None:
    """The rank in a line's prefix `time host rN | `, or None."""
    match = _RANK_OF_LINE.match(line)
    return int(match.group(1)) if match else None


class PipeCopier(threading.Thread):
    """Copies whole lines from a pipe to several file descriptors until the pipe ends; `hear` gets each as well."""

    def __init__(self, pipe: IO[bytes], targets: list[int], hear: Callable[[bytes], None] = lambda line: None) -> None:
        super().__init__(name="pipe copier", daemon=True)
        self._pipe = pipe
        self._targets = targets
        self._hear = hear
        self.start()

    def run(self) -> None:
        for line in self._pipe:
            self._hear(line)
            whole = line if line.endswith(b"\n") else line + b"\n"
            for target in list(self._targets):
                try:
                    write_all(target, whole)
                except OSError:
                    # A closed terminal or a full disk must not stop the ranks, which wait for this pipe.
                    self._targets.remove(target)


class FileFollower(threading.Thread):
    """Gives every line that is added to a file, which may not exist yet, to `sink` until told to stop."""

    def __init__(self, path: Path, sink: Callable[[bytes], None], *, from_end: bool) -> None:
        super().__init__(name=f"following {path.name}", daemon=True)
        self._reader = GrowingFile(path, from_end=from_end)
        self._sink = sink
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(POLL_S):
            self._pass_on()
        self._pass_on()

    def finish(self) -> None:
        """Give what is still unread and end."""
        self._ended.set()
        self.join(timeout=5.0)

    def _pass_on(self) -> None:
        for line in self._reader.new_lines():
            self._sink(line)


class GrowingFile:
    """Reads the whole lines that were added to a file since the last look."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0
        self._rest = b""

    def new_lines(self) -> list[bytes]:
        """Lines with their line ends; a file that is not there has none."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line + b"\n" for line in lines]


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it, also where a signal or a full pipe cuts a write short."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            time.sleep(0.01)

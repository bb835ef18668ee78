"""One kind of file system, as a `Store` speaks to it: by its own exceptions. Needs no torch."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from hpc_train.checkpoint.stores.cause import Cause

Buffer = memoryview

LAST_FILE = "manifest.json"
"""Written last into a checkpoint: a folder with it is whole."""


@dataclass(frozen=True)
class Entry:
    """A file or folder: its last name, size (0 for a folder) and time of last change, seconds since 1970."""

    name: str
    is_folder: bool
    num_bytes: int
    changed_at: float


class BackendReader(ABC):
    """An open file."""

    @abstractmethod
    def read_into(self, start: int, buffer: Buffer) -> int:
        """Fill the buffer with bytes from `start` on; how many there were before the file's end."""

    @abstractmethod
    def close(self) -> None: ...


class BackendWriter(ABC):
    """A file that is being written from its beginning to its end."""

    @abstractmethod
    def write(self, data: Buffer) -> None:
        """Take all of it."""

    @abstractmethod
    def close(self) -> None:
        """Return when the bytes survive the death of this process and, where the store can say so, of its node."""

    @abstractmethod
    def abandon(self) -> None:
        """Let go of a file that will not be used; raises nothing."""


class Backend(ABC):
    """One file system, by absolute paths. Raises its own exceptions, and Python's for what is missing or there already.

    Nobody but `Store` calls it. moved_at: when a part of a call that may take long was done last, as `Store` has it.
    has_rename: else files are copied to the new name one by one, `LAST_FILE` last; asked again, it goes on with that.
    """

    moved_at = 0.0
    has_rename = True

    def moved(self) -> None:
        """A part of a call is done: who waits for it sees that it gets on."""
        self.moved_at = time.monotonic()

    @abstractmethod
    def entry(self, path: str) -> Entry | None: ...

    @abstractmethod
    def entries(self, path: str) -> list[Entry]: ...

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """With those above it; nothing happens where it is there."""

    @abstractmethod
    def rename(self, source: str, target: str) -> None:
        """In one step, or as has_rename says. `Store` has seen that there is no target."""

    @abstractmethod
    def replace(self, source: str, target: str) -> None:
        """A file in the place of another, in one step."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """A file, or a folder with all that is in it; nothing happens where it is missing."""

    @abstractmethod
    def open_read(self, path: str) -> BackendReader: ...

    @abstractmethod
    def create(self, path: str) -> BackendWriter:
        """A new file; FileExistsError where there is one."""

    @abstractmethod
    def flush_folder(self, path: str) -> None:
        """Make the names in a folder durable, where that has to be asked for."""

    @abstractmethod
    def free_bytes(self, path: str) -> int | None:
        """What may still be written there; None where the store does not say."""

    @abstractmethod
    def cause(self, problem: Exception) -> Cause: ...

    def rot(self, path: str, span: range, cause: Cause) -> str | None:
        """In words what has rotted for good of a file, whose bytes in `span` were not given for this cause.

        None where that is not known. Raises nothing.
        """
        return None

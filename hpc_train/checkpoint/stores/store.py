"""What checkpoints need of a file system, the same on a local one and on HDFS. Needs no torch.

A `Backend` speaks to one kind of file system and fails in that one's own way. `Store` stands before it and adds what is
alike for all: failures in words with their cure, bounded retries where waiting helps, renames that never replace, and a
connection of its own in each process.
"""

from __future__ import annotations

import os
import posixpath
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from hpc_train.checkpoint.stores.backend import LAST_FILE, Backend, BackendReader, BackendWriter, Buffer, Entry
from hpc_train.checkpoint.stores.caller import Bound, Caller, StoreWait
from hpc_train.checkpoint.stores.cause import Cause, StoreError, StoreHang
from hpc_train.errors import HpcTrainError
from hpc_train.log import warn

T = TypeVar("T")

_BLOCK_BYTES = 8 << 20
"""Of a text or a trial; assumed: large enough that calls cost nothing."""
_PIECE_BYTES = 16 << 20
"""Read or written by one call, of which who waits sees that it gets on (assumed: calls cost nothing beside it)."""
_SAY_EVERY_S = 30.0
_ROT_CURE = "Tell the site, which may have another copy of the file."
_PANIC = "PanicException"
"""cited: pyo3, whose module pyo3_runtime cannot be imported."""
_JAVA_STACK = re.compile(r"(\n|\\n)(\t|\\t)at ")


@dataclass(frozen=True)
class Patience:
    """How long to go on trying where waiting may help. The pause doubles from first_pause_s to longest_pause_s.

    bound: of each call, also of one that does not come back; None: it is waited for as long as it takes.
    120 s (assumed): a name node of a large site is back from a fail-over in less, and a job's warning is often longer.
    """

    total_s: float = 120.0
    first_pause_s: float = 0.2
    longest_pause_s: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    bound: Bound | None = None


class ClientPanic(Exception):
    """A client in Rust has come to what it was not written for."""


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """A panic is raised as no Exception: it would pass by all that tells other ranks, or end a thread unseen."""
    try:
        yield
    except Exception:
        raise
    except BaseException as problem:
        if type(problem).__name__ != _PANIC:
            raise
        raise ClientPanic(f"the client has panicked: {problem}") from problem


class Store:
    """A file system that checkpoints lie on. prefix: what stands before its paths in a URL; "" for the local one.

    Raises FileNotFoundError and FileExistsError where a caller may go on from them, StoreError for all else.
    """

    def __init__(self, prefix: str, connect: Callable[[], Backend], patience: Patience | None = None) -> None:
        self.prefix = prefix
        self._connect = connect
        self._patience = patience or Patience()
        self._backend: Backend | None = None
        self._pid = 0
        self._inherited: list[Backend] = []
        self._said_at: float | None = None
        self._moved_at = 0.0
        self._of_thread = threading.local()

    @property
    def patience(self) -> Patience:
        return self._patience

    def within(self, bound: Bound) -> Store:
        """The same file system by the same connection, with calls that are waited for within a bound."""
        return Store(self.prefix, self.backend, replace(self._patience, bound=bound))

    @property
    def moved_at(self) -> float:
        """When something was written, read, renamed or removed last, on the clock of time.monotonic.

        A look that finds what it found before is none of these: who waits for a file of another node does not get on.
        """
        return max(self._moved_at, 0.0 if self._backend is None else self._backend.moved_at)

    def url(self, path: str) -> str:
        return self.prefix + path

    def entry(self, path: str) -> Entry | None:
        """A file or folder, or None where there is nothing."""
        return self._call("look at", path, lambda backend: backend.entry(path))

    def entries(self, path: str) -> list[Entry]:
        """All that lies in a folder, by name. FileNotFoundError: there is no such folder."""
        found = self._call("list", path, lambda backend: backend.entries(path))
        return sorted(found, key=lambda entry: entry.name)

    def make_folder(self, path: str) -> None:
        """With those above it; nothing happens where it is there."""
        what = "make the folder"
        try:
            self.call(what, path, lambda backend: backend.make_folder(path))
        except (FileNotFoundError, FileExistsError) as problem:  # nobody goes on from these here
            raise self.failure(what, path, problem, self.backend().cause(problem)) from problem

    def rename(self, source: str, target: str) -> None:
        """Give a file or folder its other name in one step. What has that name already is never replaced or entered.

        One process at a time may rename to a name.
        """
        is_asked = False

        def call(backend: Backend) -> None:
            nonlocal is_asked
            if backend.entry(target) is not None and (backend.has_rename or not is_asked):
                if is_asked and backend.entry(source) is None:
                    return  # done by an attempt whose answer was lost
                raise StoreError(f"{self.url(source)} cannot be renamed: {self.url(target)} exists already")
            is_asked = True
            backend.rename(source, target)
            # An old-style HDFS rename moves a folder into a folder that has appeared in the meantime.
            inside, found = posixpath.join(target, posixpath.basename(source)), backend.entry(target)
            is_inside = found is not None and found.is_folder and backend.entry(inside) is not None
            if found is None or is_inside or backend.entry(source) is not None:
                raise StoreError(
                    f"{self.url(source)} was not renamed to {self.url(target)} as asked; is another run writing there?"
                )

        self.call("rename", source, call)

    def replace(self, source: str, target: str) -> None:
        """Put a file in the place of another."""
        is_asked = False

        def call(backend: Backend) -> None:
            nonlocal is_asked
            if is_asked and backend.entry(source) is None and backend.entry(target) is not None:
                return
            is_asked = True
            backend.replace(source, target)

        self.call("replace", target, call)

    def remove(self, path: str) -> None:
        """Remove a file, or a folder and all in it; nothing happens where it is missing."""
        self.call("remove", path, lambda backend: backend.remove(path))

    def discard(self, path: str, doomed: str) -> None:
        """Remove a folder, which loses its name first: at once for every reader. doomed: the name that it has then.

        Raises:
            StoreError: some of it could not be removed, and is left under that name; where there is no rename, without
                its manifest.
        """
        if self.backend().has_rename:
            self.rename(path, doomed)
            path = doomed
        else:
            self.remove(posixpath.join(path, LAST_FILE))
        self.remove(path)

    def flush_folder(self, path: str) -> None:
        self.call("flush", path, lambda backend: backend.flush_folder(path))

    def free_bytes(self, path: str) -> int | None:
        return self._call("ask for the space of", path, lambda backend: backend.free_bytes(path))

    @contextmanager
    def reading(self, path: str) -> Iterator[Reader]:
        """An open file. FileNotFoundError: there is none."""
        reader = Reader(self, path)
        try:
            yield reader
        finally:
            reader.close()

    @contextmanager
    def writing(self, path: str) -> Iterator[Writer]:
        """A new file, durable when the block ends well, given up when it does not. FileExistsError: there is one."""
        writer = Writer(self, path)
        try:
            yield writer
            writer.close()
        except BaseException:
            writer.abandon()
            raise

    def read_text(self, path: str) -> str:
        parts, start = [], 0
        with self.reading(path) as reader:
            while True:
                block = bytearray(_BLOCK_BYTES)
                count = reader.read_into(start, memoryview(block))
                parts.append(bytes(block[:count]))
                start += count
                if count < _BLOCK_BYTES:
                    return b"".join(parts).decode()

    def write_text(self, path: str, text: str) -> None:
        """Write a new file whole, anew where that fails in a way that may pass. FileExistsError: there is one."""
        create, is_made = _creation(path), False

        def ask(backend: Backend) -> None:
            nonlocal is_made
            if is_made:
                backend.remove(path)  # a part of it, or all of it where the answer was lost
            file = create(backend)
            is_made = True
            try:
                file.write(memoryview(text.encode()))
                file.close()
            except BaseException:
                file.abandon()
                raise

        self.call("write", path, ask)

    def carry_out(self, what: str, path: str, act: Callable[[], T]) -> T:
        """What `act` gives, which does something in this file system, within the bound of calls.

        Raises:
            StoreHang: it does not get on. Beside what act raises.
        """
        bound = self._patience.bound
        if bound is None:
            return act()
        words = f"{what} {self.url(path)}"
        waiting = StoreWait(f"the store to {words}", f"cannot {words}", "the store", [self], bound)
        return self._caller().call(act, waiting)

    # For Reader and Writer below.

    def moved(self) -> None:
        self._moved_at = time.monotonic()

    def backend(self) -> Backend:
        """The connection of this process: one from before a fork hangs in the child, so it is left and never used."""
        if self._backend is None or self._pid != os.getpid():
            if self._backend is not None:
                self._inherited.append(self._backend)  # kept: to end it would touch the parent's
            self._pid = os.getpid()
            self._backend = self._connected()
        return self._backend

    def _connected(self) -> Backend:
        self._backend = None
        try:
            with _panics_as_errors():
                return self._connect()
        except HpcTrainError:
            raise
        except Exception as problem:
            raise StoreError(f"cannot use {self.prefix}: {type(problem).__name__}: {problem}") from problem

    def _caller(self) -> Caller:
        """For the calls of this thread."""
        mine, pid = self._of_thread, os.getpid()
        if getattr(mine, "pid", None) != pid:  # as with connections: a fork has no thread but its own
            mine.pid, mine.caller = pid, Caller(f"calls of {self.prefix or 'files'}")
        caller: Caller = mine.caller
        return caller

    def failure(self, what: str, path: str, problem: Exception, cause: Cause, waited_s: float = 0.0) -> StoreError:
        waited = f" (tried for {waited_s:.0f} s)" if waited_s >= 1 else ""
        told = _JAVA_STACK.split(f"{type(problem).__name__}: {problem}")[0].strip().replace("\n", " ")
        return StoreError(f"cannot {what} {self.url(path)}{waited}: {cause.text}. {cause.cure} [{told}]", cause)

    def _say_waiting(self, what: str, path: str, cause: Cause) -> None:
        now = self._patience.clock()
        if self._said_at is None or now - self._said_at > _SAY_EVERY_S:
            self._said_at = now
            warn(f"cannot {what} {self.url(path)} yet: {cause.text}; trying for up to {self._patience.total_s:.0f} s")

    def call(self, what: str, path: str, ask: Callable[[Backend], T], span: range | None = None) -> T:
        """As `_call`, for what is more than a look."""
        value = self._call(what, path, ask, span)
        self.moved()
        return value

    def _call(self, what: str, path: str, ask: Callable[[Backend], T], span: range | None = None) -> T:
        """Ask, again and again where waiting may help, until it works or patience ends. span: bytes that are read."""
        patience = self._patience
        start, pause_s = patience.clock(), patience.first_pause_s
        while True:
            try:
                with _panics_as_errors():
                    return self.carry_out(what, path, lambda: ask(self.backend()))
            except (FileNotFoundError, FileExistsError, HpcTrainError):
                raise
            except Exception as problem:
                cause = self.backend().cause(problem)
                if span is not None and not cause.is_damage:
                    rot = self.backend().rot(path, span, cause)
                    cause = cause if rot is None else Cause(rot, False, _ROT_CURE, is_of_file=True, is_damage=True)
                waited_s = patience.clock() - start
                if not cause.may_pass or waited_s + pause_s > patience.total_s:
                    raise self.failure(what, path, problem, cause, waited_s) from problem
            self._say_waiting(what, path, cause)
            patience.sleep(pause_s)
            pause_s = min(2 * pause_s, patience.longest_pause_s)


def _creation(path: str) -> Callable[[Backend], BackendWriter]:
    """Makes a new file, when asked again as well."""
    is_asked = False

    def create(backend: Backend) -> BackendWriter:
        nonlocal is_asked
        if is_asked and (found := backend.entry(path)) is not None and found.num_bytes == 0:
            backend.remove(path)  # made by an attempt whose answer was lost
        is_asked = True
        return backend.create(path)

    return create


class Reader:
    """An open file; opened anew where a read fails in a way that may pass, such as a stale handle (FC-74)."""

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path = store, path
        self._open: BackendReader | None = store.call("open", path, lambda backend: backend.open_read(path))

    def read_into(self, start: int, buffer: Buffer) -> int:
        """Fill the buffer from `start` on; how many bytes there were before the end."""
        done = 0
        while True:
            piece = buffer[done : done + _PIECE_BYTES]
            count = self._read(start + done, piece)
            done += count
            if count < len(piece) or done == len(buffer):
                return done

    def close(self) -> None:
        with suppress(StoreHang):
            self._store.carry_out("close", self._path, self._close)

    def _read(self, start: int, piece: Buffer) -> int:
        def ask(backend: Backend) -> int:
            if self._open is None:
                self._open = backend.open_read(self._path)
            try:
                return self._open.read_into(start, piece)
            except Exception:
                self._close()
                raise

        return self._store.call("read", self._path, ask, range(start, start + len(piece)))

    def _close(self) -> None:
        if self._open is not None:
            with suppress(Exception):
                self._open.close()  # nothing was written
            self._open = None


class Writer:
    """A file that is being written. A failed write is not tried again: nobody knows what of it arrived."""

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path = store, path
        self._open: Any = store.call("create", path, _creation(path))

    def write(self, data: Buffer) -> None:
        for at in range(0, len(data), _PIECE_BYTES):
            piece = data[at : at + _PIECE_BYTES]
            self._attempt("write", partial(self._open.write, piece))

    def close(self) -> None:
        self._attempt("finish", self._open.close)

    def abandon(self) -> None:
        with suppress(StoreHang):
            self._store.carry_out("give up", self._path, self._open.abandon)

    def _attempt(self, what: str, call: Callable[[], None]) -> None:
        try:
            with _panics_as_errors():
                self._store.carry_out(what, self._path, call)
            self._store.moved()
        except StoreError:
            raise
        except Exception as problem:
            raise self._store.failure(what, self._path, problem, self._store.backend().cause(problem)) from problem

"""A place in a store, from a path or a URL: `file:///scratch/x`, `hdfs://nn1:8020/user/me`, `runs/llama/123`.

Needs no torch; a client is imported when the first such URL is used.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hpc_train.checkpoint.stores.backend import Backend, Entry
from hpc_train.checkpoint.stores.caller import Bound
from hpc_train.checkpoint.stores.fsspec_store import FsspecBackend, require_client
from hpc_train.checkpoint.stores.store import Patience, Reader, Store, Writer
from hpc_train.errors import ConfigError

T = TypeVar("T")

_BLOCK_BYTES = 8 << 20
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(/[^/]*)?(.*)", re.DOTALL)


@dataclass(frozen=True)
class Location:
    """A file or folder of a store, there or not."""

    store: Store
    path: str

    def __str__(self) -> str:
        return self.store.url(self.path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> Location:
        return Location(self.store, posixpath.join(self.path, name))

    @property
    def name(self) -> str:
        return posixpath.basename(self.path)

    @property
    def parent(self) -> Location:
        return Location(self.store, posixpath.dirname(self.path) or ".")

    @property
    def local(self) -> Path | None:
        """Its path where it lies on a local file system."""
        return None if self.store.prefix else Path(self.path)

    def within(self, bound: Bound) -> Location:
        """The same place, with calls that are waited for within a bound."""
        return Location(self.store.within(bound), self.path)

    def carry_out(self, what: str, act: Callable[[], T]) -> T:
        """As `Store.carry_out`."""
        return self.store.carry_out(what, self.path, act)

    def resolved(self) -> Path | None:
        """Its absolute path without links where it lies on a local file system."""
        path = self.local
        return None if path is None else self.carry_out("look for the folders of", path.resolve)

    def entry(self) -> Entry | None:
        return self.store.entry(self.path)

    def is_folder(self) -> bool:
        return (found := self.entry()) is not None and found.is_folder

    def is_file(self) -> bool:
        return (found := self.entry()) is not None and not found.is_folder

    def entries(self) -> list[Entry]:
        return self.store.entries(self.path)

    def make_folder(self) -> None:
        self.store.make_folder(self.path)

    def rename(self, target: Location) -> None:
        self.store.rename(self.path, target.path)

    def replace(self, target: Location) -> None:
        self.store.replace(self.path, target.path)

    def remove(self) -> None:
        self.store.remove(self.path)

    def discard(self, doomed: Location) -> None:
        """Remove a folder at once for every reader; doomed: what it is called until all of it is gone."""
        self.store.discard(self.path, doomed.path)

    def flush(self) -> None:
        """Make the names in this folder durable."""
        self.store.flush_folder(self.path)

    def reading(self) -> AbstractContextManager[Reader]:
        return self.store.reading(self.path)

    def writing(self) -> AbstractContextManager[Writer]:
        return self.store.writing(self.path)

    def read_text(self) -> str:
        return self.store.read_text(self.path)

    def write_text(self, text: str) -> None:
        self.store.write_text(self.path, text)


Place = Location | Path | str
"""What functions take that are called with a path of a user as well."""


def locate(place: Place, patience: Patience | None = None) -> Location:
    """The location that a path or URL names; nothing is looked at yet.

    Raises:
        ConfigError: nothing, a scheme that no store here has, or a URL without a path.
    """
    if isinstance(place, Location):
        return place
    text = str(place)
    if not text:
        raise ConfigError("an empty path names no place; give a folder, a file or a URL")
    match = _URL.fullmatch(text) if isinstance(place, str) else None
    if match is None:
        return Location(_store("file", "", patience), str(Path(text)))
    scheme, authority, path = match[1].lower(), (match[2] or "/")[1:], match[3]
    if scheme not in _CONNECTORS:
        require_client(scheme, text)
    if match[2] is None:
        path = f"/{path}"  # file:/scratch, hdfs:/user: the one slash begins the path
    if scheme == "file" and authority not in ("", "localhost"):
        raise ConfigError(f"{text} names the host {authority}; a path on this host is file:///{authority}{path}")
    if not path.startswith("/") or not path.strip("/"):
        raise ConfigError(f"{text} has no path; write {scheme}://{authority}/some/folder")
    return Location(_store(scheme, authority, patience), path.rstrip("/"))


def copy_file(source: Location, target: Location) -> None:
    """Copy a file to a new one, of any store, a block in memory at a time; it is durable then."""
    block = memoryview(bytearray(_BLOCK_BYTES))
    with source.reading() as reader, target.writing() as writer:
        start = 0
        while count := reader.read_into(start, block):
            writer.write(block[:count])
            start += count


def _store(scheme: str, authority: str, patience: Patience | None) -> Store:
    prefix = "" if scheme == "file" else f"{scheme}://{authority}"
    if scheme not in _CONNECTORS:
        return Store(prefix, lambda: FsspecBackend(scheme, authority), patience)
    connect = _CONNECTORS[scheme]
    return Store(prefix, lambda: connect(authority), patience)


def _local(authority: str) -> Backend:
    from hpc_train.checkpoint.stores.local_store import LocalBackend

    return LocalBackend()


def _hdfs_native(authority: str) -> Backend:
    from hpc_train.checkpoint.stores.hdfs_native_store import HdfsNativeBackend
    from hpc_train.cluster.environment import process_env

    return HdfsNativeBackend(authority, process_env())


def _libhdfs(authority: str) -> Backend:
    from hpc_train.checkpoint.stores.libhdfs_store import LibHdfsBackend
    from hpc_train.cluster.environment import process_env

    return LibHdfsBackend(authority, process_env())


def _webhdfs(scheme: str) -> Callable[[str], Backend]:
    def connect(authority: str) -> Backend:
        from hpc_train.checkpoint.stores.webhdfs_store import WebHdfsBackend
        from hpc_train.cluster.environment import process_env

        return WebHdfsBackend(scheme, authority, process_env())

    return connect


_CONNECTORS: dict[str, Callable[[str], Backend]] = {
    "file": _local,
    "hdfs": _hdfs_native,
    "libhdfs": _libhdfs,
    "webhdfs": _webhdfs("webhdfs"),
    "swebhdfs": _webhdfs("swebhdfs"),
}

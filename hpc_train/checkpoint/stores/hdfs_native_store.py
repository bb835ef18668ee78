"""Checkpoints on HDFS through hdfs-native: no JVM in this process. The package is imported when this module is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hpc_train.checkpoint.stores.backend import Backend, BackendReader, BackendWriter, Buffer, Entry
from hpc_train.checkpoint.stores.cause import Cause
from hpc_train.checkpoint.stores.hdfs_causes import NO_TICKET, REFUSED_LOGIN, TICKET_RUN_OUT, connecting, hdfs_cause
from hpc_train.checkpoint.stores.hdfs_native_look import look_for_rot
from hpc_train.cluster.kerberos import ticket_left_s
from hpc_train.errors import ConfigError

try:
    import hdfs_native
except ImportError as _problem:
    raise ConfigError(
        f"hdfs:// needs the package hdfs-native, which does not import here ({_problem}): pip install 'hpc_train[hdfs]'"
    ) from _problem

_PIECE_BYTES = 4 << 20
"""Handed over in one call; the client copies it (assumed: small beside what a save holds, large beside a packet)."""

# `Store` waits and says so; by itself the client would wait minutes without a word.
_CONFIGURATION = {
    "dfs.client.failover.max.attempts": "3",
    "dfs.client.failover.sleep.base.millis": "100",
    "dfs.client.failover.sleep.max.millis": "1000",
}
_DATA_NODE = re.compile(
    r'DatanodeInfoProto \{ id: DatanodeIdProto \{.*?host_name: \\?"([^"\\]*).*?xfer_port: (\d+).*?num_blocks: [^ ]+ \}'
)
"""As the client writes one down in its errors, with some twenty figures."""


class HdfsReadError(Exception):
    """Bytes did not come: the client's words, with data nodes by their addresses."""

    def __init__(self, problem: Exception) -> None:
        super().__init__(_DATA_NODE.sub(r"\1:\2", f"{type(problem).__name__}: {problem}"))


@contextmanager
def _python_errors() -> Iterator[None]:
    """What is missing or there already as Python's own exceptions, also where the name node's words are passed on."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except Exception as problem:
        if "FileNotFoundException" in str(problem):
            raise FileNotFoundError(str(problem)) from problem
        if "FileAlreadyExistsException" in str(problem):
            raise FileExistsError(str(problem)) from problem
        raise


class HdfsNativeBackend(Backend):
    """authority: HOST:PORT of a name node, the name of a service, or "" for what Hadoop's configuration says.

    env: this process's environment.
    """

    def __init__(self, authority: str, env: Mapping[str, str]) -> None:
        self._url, self._env = f"hdfs://{authority}" if authority else None, env
        with connecting(f"hdfs://{authority}"):
            self._client: Any = hdfs_native.Client(self._url, _CONFIGURATION)

    def entry(self, path: str) -> Entry | None:
        try:
            with _python_errors():
                return _entry(self._client.get_file_info(path))
        except FileNotFoundError:
            return None

    def entries(self, path: str) -> list[Entry]:
        with _python_errors():
            return [_entry(status) for status in self._client.list_status(path, False)]

    def make_folder(self, path: str) -> None:
        self._client.mkdirs(path, create_parent=True)

    def rename(self, source: str, target: str) -> None:
        with _python_errors():
            self._client.rename(source, target, overwrite=False)

    def replace(self, source: str, target: str) -> None:
        with _python_errors():
            self._client.rename(source, target, overwrite=True)

    def remove(self, path: str) -> None:
        try:
            with _python_errors():
                self._client.delete(path, True)
        except FileNotFoundError:
            pass

    def open_read(self, path: str) -> BackendReader:
        with _python_errors():
            return _HdfsReader(self._client.read(path))

    def create(self, path: str) -> BackendWriter:
        options = hdfs_native.WriteOptions(overwrite=False, create_parent=False)
        with _python_errors():
            return _HdfsWriter(self._client.create(path, options))

    def flush_folder(self, path: str) -> None:
        """The name node has written each change to its journal before it answers."""

    def free_bytes(self, path: str) -> int | None:
        return None

    def cause(self, problem: Exception) -> Cause:
        cause = hdfs_cause(f"{type(problem).__name__}: {problem}")
        if cause == REFUSED_LOGIN and "GSSAPI" in str(problem):
            # measured: before 0.14.7 the client passes on that Kerberos failed, but not of what.
            left_s = ticket_left_s()
            return NO_TICKET if left_s is None else cause if left_s else TICKET_RUN_OUT
        return cause

    def rot(self, path: str, span: range, cause: Cause) -> str | None:
        return look_for_rot(self._url, path, span, self._env) if cause.is_of_file else None


class _HdfsReader(BackendReader):
    def __init__(self, file: Any) -> None:
        self._file = file
        self._num_bytes = len(file)

    def read_into(self, start: int, buffer: Buffer) -> int:
        wanted = max(0, min(len(buffer), self._num_bytes - start))
        for at in range(0, wanted, _PIECE_BYTES):
            count = min(_PIECE_BYTES, wanted - at)
            try:
                buffer[at : at + count] = self._file.read_range(start + at, count)
            except Exception as problem:
                raise HdfsReadError(problem) from problem
        return wanted

    def close(self) -> None:
        self._file.close()


class _HdfsWriter(BackendWriter):
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Buffer) -> None:
        for at in range(0, len(data), _PIECE_BYTES):
            self._file.write(bytes(data[at : at + _PIECE_BYTES]))

    def close(self) -> None:
        """The data nodes of the last block have all of it, and the name node its length."""
        self._file.close()

    def abandon(self) -> None:
        """Leave it as it is: whoever removes the file ends its lease, which else runs out by itself.

        To close it would wait for the lost blocks (18 s seen after a data node died), and it is closed once more by
        Python when it is collected, so that is taken from it.
        """
        self._file.close = lambda: None


def _entry(status: Any) -> Entry:
    name = str(status.path).rstrip("/").rpartition("/")[2]
    num_bytes = 0 if status.isdir else int(status.length)
    return Entry(name, bool(status.isdir), num_bytes, status.modification_time / 1000)

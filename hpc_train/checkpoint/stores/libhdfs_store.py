"""Checkpoints on HDFS through pyarrow and libhdfs: Hadoop's own Java client, in a JVM within this process.

For sites whose HDFS the other clients do not speak to. Needs the package pyarrow, libhdfs.so (ARROW_LIBHDFS_DIR, or
HADOOP_HOME/lib/native), libjvm.so (JAVA_HOME), and Hadoop's classes: CLASSPATH, or the command `hadoop`, which is asked
for them.
"""

from __future__ import annotations

import ctypes
import os
import posixpath
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.stores.backend import Backend, BackendReader, BackendWriter, Buffer, Entry
from hpc_train.checkpoint.stores.cause import Cause
from hpc_train.checkpoint.stores.hdfs_causes import connecting, hdfs_cause
from hpc_train.checkpoint.stores.hdfs_native_look import look_for_rot
from hpc_train.cluster.environment import tell_libraries
from hpc_train.errors import ConfigError

try:
    from pyarrow import fs
except ImportError as _problem:
    raise ConfigError(
        f"libhdfs:// needs the package pyarrow, which does not import here ({_problem}): "
        "pip install 'hpc_train[libhdfs]', or use hdfs://, which needs no Java"
    ) from _problem

_PIECE_BYTES = 4 << 20
"""Handed over in one call; libhdfs copies it into Java's memory (assumed: as with hdfs-native)."""
_CLASSPATH_S = 60.0
"""For `hadoop classpath`; assumed: a shell script on a network file system."""
_LEAVE_SIGNALS = "-Xrs"
"""Else a TERM, for which a run saves, ends the process in the JVM."""
_WORDS_OF_ERRNO = {
    # cited: libhdfs, exception.c: what it makes of Java's exceptions. Here again by the words of `hdfs_causes`.
    "[Errno 13]": "AccessControlException",
    "[Errno 30]": "SafeModeException",
    "[Errno 116]": "LeaseExpiredException",
    "[Errno 122]": "QuotaExceededException",
}

_ELSEWHERE = Cause(
    "HDFS refused or did not answer, and this libhdfs, of before Hadoop 3.0, has said why on standard error alone",
    True,
    "Look at Java's words in the log of the rank or of the node agent.",
)
"""A lost connection has no number of its own there, so it may be one: nothing is known of what lies in the store."""

_process_of_jvm: int | None = None
"""The process whose JVM it is: a fact of the process, and a child of it by a fork has none and can start none."""


class LibHdfsBackend(Backend):
    """authority: HOST:PORT of a name node, the name of a service, or "" for what Hadoop's configuration says.

    env: this process's environment.
    """

    def __init__(self, authority: str, env: Mapping[str, str]) -> None:
        _require_own_jvm()
        options = env.get("LIBHDFS_OPTS", "").split()
        if _LEAVE_SIGNALS not in options:  # set by an earlier connection, or by the parent
            options.append(_LEAVE_SIGNALS)
        # libhdfs looks for both when the JVM starts.
        tell_libraries({"CLASSPATH": env.get("CLASSPATH") or _class_path(env), "LIBHDFS_OPTS": " ".join(options)})
        host, _, port = authority.rpartition(":") if ":" in authority else (authority, "", "0")
        self._url, self._env = f"hdfs://{authority}" if authority else None, env
        # As many copies of a block as Hadoop's configuration says; pyarrow's default is 3.
        with connecting(f"libhdfs://{authority}"), _with_root_cause():
            self._files: Any = fs.HadoopFileSystem(host or "default", int(port), replication=0)

    def entry(self, path: str) -> Entry | None:
        with _with_root_cause():
            found = self._files.get_file_info(path)
        if found.type != fs.FileType.NotFound:
            return _entry(found)
        # pyarrow says so of every failure to look, also of a name node that is down. A failure to list is raised.
        name = posixpath.basename(path)
        try:
            return next((entry for entry in self.entries(posixpath.dirname(path)) if entry.name == name), None)
        except FileNotFoundError:
            return None

    def entries(self, path: str) -> list[Entry]:
        with _with_root_cause():
            return [_entry(found) for found in self._files.get_file_info(fs.FileSelector(path))]

    def make_folder(self, path: str) -> None:
        with _with_root_cause():
            self._files.create_dir(path, recursive=True)

    def rename(self, source: str, target: str) -> None:
        with _with_root_cause():
            self._files.move(source, target)

    def replace(self, source: str, target: str) -> None:
        # libhdfs has the older rename alone, which replaces nothing: for a moment there is neither.
        self.remove(target)
        self.rename(source, target)

    def remove(self, path: str) -> None:
        found = self.entry(path)
        if found is not None:
            with _with_root_cause():
                (self._files.delete_dir if found.is_folder else self._files.delete_file)(path)

    def open_read(self, path: str) -> BackendReader:
        with _with_root_cause():
            file = self._files.open_input_file(path)
            try:
                return _LibHdfsReader(file, file.size())
            except BaseException:
                with suppress(Exception):
                    file.close()
                raise

    def create(self, path: str) -> BackendWriter:
        # libhdfs replaces what is there. Names of files are given once, so nobody else makes it in this moment.
        if self.entry(path) is not None:
            raise FileExistsError(path)
        with _with_root_cause():
            return _LibHdfsWriter(self._files.open_output_stream(path))

    def flush_folder(self, path: str) -> None:
        """The name node has written each change to its journal before it answers."""

    def free_bytes(self, path: str) -> int | None:
        return None

    def cause(self, problem: Exception) -> Cause:
        words = f"{type(problem).__name__}: {problem}"
        words = next((f"{name}: {words}" for code, name in _WORDS_OF_ERRNO.items() if code in words), words)
        cause = hdfs_cause(words)
        return _ELSEWHERE if cause == hdfs_cause("") and "[Errno 255]" in words else cause

    def rot(self, path: str, span: range, cause: Cause) -> str | None:
        # Java does not tell it; hdfs-native may, where that is installed and this HDFS speaks to it.
        return look_for_rot(self._url, path, span, self._env) if cause.is_of_file or cause is _ELSEWHERE else None


class _LibHdfsReader(BackendReader):
    def __init__(self, file: Any, num_bytes: int) -> None:
        self._file, self._num_bytes = file, num_bytes

    def read_into(self, start: int, buffer: Buffer) -> int:
        wanted, done = max(0, min(len(buffer), self._num_bytes - start)), 0
        while done < wanted:
            with _with_root_cause():
                data = self._file.read_at(min(_PIECE_BYTES, wanted - done), start + done)
            if not data:
                raise OSError(f"unexpected end: {done} of {wanted} bytes at {start} came")
            buffer[done : done + len(data)] = data
            done += len(data)
        return wanted

    def close(self) -> None:
        self._file.close()


class _LibHdfsWriter(BackendWriter):
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Buffer) -> None:
        with _with_root_cause():
            for at in range(0, len(data), _PIECE_BYTES):
                self._file.write(data[at : at + _PIECE_BYTES])

    def close(self) -> None:
        """The data nodes of the last block have all of it, and the name node its length."""
        with _with_root_cause():
            self._file.close()

    def abandon(self) -> None:
        with suppress(Exception):
            self._file.close()


def _require_own_jvm() -> None:
    global _process_of_jvm
    if _process_of_jvm not in (None, os.getpid()):
        raise ConfigError(
            "libhdfs:// cannot be used here: this process was forked from one that uses it, and Java does not live on "
            "in a fork. Start the process anew (multiprocessing's `spawn` or `forkserver`), or use hdfs://."
        )
    _process_of_jvm = os.getpid()


def _class_path(env: Mapping[str, str]) -> str:
    """Hadoop's classes and configuration, each jar by its name: a JVM within a process knows no patterns."""
    home = env.get("HADOOP_HOME")
    program = str(Path(home) / "bin" / "hadoop") if home else shutil.which("hadoop", path=env.get("PATH"))
    if program is None:
        raise ConfigError(
            "libhdfs:// needs Hadoop's classes: set HADOOP_HOME or CLASSPATH (`hadoop classpath --glob`) in the job, "
            "such as by launch.env, or have the command `hadoop` in PATH"
        )
    try:
        done = subprocess.run(
            [program, "classpath", "--glob"], capture_output=True, text=True, timeout=_CLASSPATH_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as problem:
        raise ConfigError(
            f"libhdfs:// needs Hadoop's classes, and `{program} classpath --glob` fails: {problem}"
        ) from None
    return done.stdout.strip()


@contextmanager
def _with_root_cause() -> Iterator[None]:
    """pyarrow tells libhdfs' error number alone; Java's own words come with it where libhdfs keeps them."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as problem:
        words = _last_root_cause()
        if not words:
            raise
        if "FileNotFoundException" in words:
            raise FileNotFoundError(words) from problem
        raise OSError(f"{words} ({problem})") from problem


def _last_root_cause() -> str:
    """What Java said last in this thread; "" where libhdfs, before Hadoop 3.0, does not keep it."""
    # Where pyarrow has loaded it from: it takes several paths, and keeps the names to itself.
    loaded = re.search(r"\S*/libhdfs\.so\S*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    call = getattr(ctypes.CDLL(loaded[0]), "hdfsGetLastExceptionRootCause", None) if loaded else None
    if call is None:
        return ""
    call.restype = ctypes.c_char_p
    told: bytes | None = call()
    return (told or b"").decode(errors="replace").strip()


def _entry(found: Any) -> Entry:
    is_folder = found.type == fs.FileType.Directory
    changed_at = found.mtime.timestamp() if found.mtime is not None else 0.0
    return Entry(found.base_name, is_folder, 0 if is_folder else int(found.size), changed_at)

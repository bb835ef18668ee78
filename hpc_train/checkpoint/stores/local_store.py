"""Checkpoints on a local or parallel file system."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpc_train.checkpoint.stores.backend import Backend, BackendReader, BackendWriter, Buffer, Entry
from hpc_train.checkpoint.stores.cause import Cause

_FILE_IN_THE_WAY = Cause(
    "a file stands where a folder is needed", False, "Rename it, or choose another folder.", is_damage=True
)
_NO_PERMISSION = Cause(
    "no permission", False, "Have its owner or mode changed, or choose a folder that this user may read and write."
)
_CAUSES = {
    errno.ENOSPC: Cause("no space is left", False, "Remove old files, or choose another folder."),
    errno.EDQUOT: Cause("the quota is used up", False, "Remove old files, or choose another folder."),
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EIO: Cause("the disk or its server has failed", False, "Try to read it by hand, and tell the site."),
    errno.EROFS: Cause("the file system is mounted read-only", False, "Choose another one, or tell the site."),
    errno.ENOTDIR: _FILE_IN_THE_WAY,
    errno.EEXIST: _FILE_IN_THE_WAY,
    errno.EISDIR: Cause("a folder stands where a file is needed", False, "Rename it.", is_damage=True),
    errno.ENOENT: Cause("no folder can be made there", False, "Choose another one."),
    errno.ENAMETOOLONG: Cause("the name is too long for this file system", False, "Choose a shorter one."),
    errno.ELOOP: Cause("its links lead in a circle", False, "Mend the link, or choose another folder.", is_damage=True),
    errno.ESTALE: Cause("the file handle is stale", True, "Tell the site if its file servers do this often."),
    errno.ETIMEDOUT: Cause("the file server does not answer", True, "Tell the site."),
}
_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_WRITE_OUT_BYTES = 16 << 20
"""Written before the disk is set to work on it (assumed: a disk's queue is full with it, and calls cost nothing)."""
_BEGIN, _TO_THE_END = 2, 1 | 2 | 4
"""cited: sync_file_range(2). Start writing out what is dirty, without waiting for it; and wait for all of it."""
_CANNOT_WRITE_OUT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ESPIPE, errno.EPERM)
"""Where a file system has no such call, or a container does not let it through (assumed)."""

_OTHER = Cause("the file system refused", False, "Look at the system's words:")


def cause_of_number(problem: Exception) -> Cause | None:
    """By the number of a system's error."""
    return _CAUSES.get(getattr(problem, "errno", None) or 0)


class LocalBackend(Backend):
    """Python's own file functions, by paths as they are given."""

    def entry(self, path: str) -> Entry | None:
        found = _look(path)
        return None if found is None else _entry(os.path.basename(path), found)

    def entries(self, path: str) -> list[Entry]:
        listed = []
        with os.scandir(path) as folder:
            for item in folder:
                if (found := _look(item.path)) is not None:  # else removed in this moment
                    listed.append(_entry(item.name, found))
        return listed

    def make_folder(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)

    def remove(self, path: str) -> None:
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                self._remove_files(path)
                shutil.rmtree(path)
            else:
                os.unlink(path)
        except FileNotFoundError:
            pass

    def _remove_files(self, path: str) -> None:
        """One by one, of which each is seen to get on: there may be thousands."""
        with os.scandir(path) as folder:
            names = [item.path for item in folder if not item.is_dir(follow_symlinks=False)]
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(name)
            self.moved()

    def open_read(self, path: str) -> BackendReader:
        return _LocalReader(path)

    def create(self, path: str) -> BackendWriter:
        return _LocalWriter(path, self.moved)

    def flush_folder(self, path: str) -> None:
        flush_folder(Path(path))

    def free_bytes(self, path: str) -> int | None:
        place = Path(path).absolute()
        while not os.path.exists(place) and place != place.parent:
            place = place.parent
        return shutil.disk_usage(place).free

    def cause(self, problem: Exception) -> Cause:
        return cause_of_number(problem) or _OTHER


class _LocalReader(BackendReader):
    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_into(self, start: int, buffer: Buffer) -> int:
        filled = 0
        while filled < len(buffer):
            count = os.preadv(self._descriptor, [buffer[filled:]], start + filled)
            if count == 0:
                break
            filled += count
        return filled

    def close(self) -> None:
        os.close(self._descriptor)


class _LocalWriter(BackendWriter):
    """The disk works on a file while more of it comes: else all of it would wait in memory for the end."""

    def __init__(self, path: str, moved: Callable[[], None] = lambda: None) -> None:
        """moved: called for each part that the disk has, when the file is made durable."""
        self._file = open(path, "xb")  # noqa: SIM115 - open until close or abandon
        self._moved = moved
        self._num_bytes = self._begun = 0

    def write(self, data: Buffer) -> None:
        self._file.write(data)
        self._num_bytes += len(data)
        if (count := self._num_bytes - self._begun) >= _WRITE_OUT_BYTES:
            _write_out(self._file.fileno(), self._begun, count, _BEGIN)
            self._begun = self._num_bytes

    def close(self) -> None:
        with self._file as file:
            file.flush()
            # In parts, each of which is seen to be done: memory may hold what a slow disk needs many minutes for.
            for start in range(0, self._num_bytes, _WRITE_OUT_BYTES):
                if not _write_out(file.fileno(), start, _WRITE_OUT_BYTES, _TO_THE_END):
                    break
                self._moved()
            os.fsync(file.fileno())

    def abandon(self) -> None:
        with suppress(OSError):
            self._file.close()


def _write_out(descriptor: int, start: int, num_bytes: int, flags: int) -> bool:
    """Have the kernel write a range of a file to its disk; false where it cannot, and the file's fsync does it alone.

    Raises:
        OSError: the disk has failed. It is told once, here or by fsync.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is None:
        return False
    if call(descriptor, ctypes.c_int64(start), ctypes.c_int64(num_bytes), ctypes.c_uint(flags)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_WRITE_OUT:
        return False
    raise OSError(number, os.strerror(number))


def flush_folder(path: Path) -> None:
    """Make names in a folder durable; file systems that cannot are left alone."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _look(path: str) -> os.stat_result | None:
    """What has a name, behind links; of a link that leads nowhere the link, since its name is taken."""
    try:
        return os.stat(path)
    except OSError as problem:
        if problem.errno not in _NOWHERE:
            raise
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _entry(name: str, found: os.stat_result) -> Entry:
    num_bytes = found.st_size if stat.S_ISREG(found.st_mode) else 0
    return Entry(name, stat.S_ISDIR(found.st_mode), num_bytes, found.st_mtime)

"""Slurm's time limits, and room on a file system before it is needed."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from hpc_train.cluster.cgroup_memory import cgroup_room_bytes
from hpc_train.cluster.size_words import two_sizes
from hpc_train.errors import HpcTrainError


class Unknown(Enum):
    """A time limit that Slurm did not tell: neither a number nor "none"."""

    UNKNOWN = "unknown"


UNKNOWN = Unknown.UNKNOWN

_UNLIMITED = {"unlimited", "infinite", "infinity"}
_DAYS = re.compile(r"([0-9]+)-([0-9]+)(?::([0-9]+)(?::([0-9]+))?)?")
_CLOCK = re.compile(r"([0-9]+)(?::([0-9]+)(?::([0-9]+))?)?")
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}


def parse_time_limit(text: str, *, whole_minutes: bool = True) -> int | Unknown | None:
    """Read a Slurm time limit: seconds, None for no limit, UNKNOWN for every other word.

    minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]. 0 and UNLIMITED mean no limit.

    Args:
        whole_minutes: Round up to a whole minute as Slurm does, so that `90:30` is 91 minutes.
    """
    word = text.strip()
    if word.lower() in _UNLIMITED:
        return None
    if match := _DAYS.fullmatch(word):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    elif match := _CLOCK.fullmatch(word):
        parts = [int(part) for part in match.groups() if part is not None]
        if len(parts) < 3:
            parts = [0, *parts, *[0] * (2 - len(parts))]
        total = (parts[0] * 60 + parts[1]) * 60 + parts[2]
    else:
        return UNKNOWN
    return (-(-total // 60) * 60 if whole_minutes else total) or None


def require_free_bytes(
    path: Path,
    num_bytes: int,
    what: str,
    error: type[HpcTrainError],
    *,
    num_files: int = 0,
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs,
) -> None:
    """Refuse to begin what cannot be finished: num_bytes in num_files files for `what` under path.

    path need not exist yet. A file system that does not count inodes is not asked for them. A quota is not
    seen here; see require_writable.

    Raises:
        error: Too few free bytes or inodes, or the file system cannot be asked.
    """
    folder = _existing_parent(path)
    try:
        stats = statvfs(folder)
    except OSError as problem:
        raise error(f"The file system of {folder} cannot be asked for free space: {problem}.") from problem
    free = stats.f_bavail * stats.f_frsize
    if free < num_bytes:
        needed, there = two_sizes(num_bytes, free)
        raise error(f"{what} needs {needed}, but {folder} has {there} free. Free some space, or choose another folder.")
    if stats.f_files > 0 and stats.f_favail < num_files:
        raise error(
            f"{what} needs {num_files} files, but {folder} has {stats.f_favail} inodes left. Delete files, or "
            "choose another folder."
        )


def require_writable(path: Path, what: str, error: type[HpcTrainError], *, num_bytes: int = 1 << 20) -> None:
    """Write, flush and remove a trial file under path, which finds a spent quota that free space hides.

    Raises:
        error: It cannot be written there.
    """
    import tempfile

    folder = _existing_parent(path)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hpc_train-trial-") as trial:
            trial.write(bytes(num_bytes))
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as problem:
        why = _FULL.get(problem.errno or 0, str(problem))
        raise error(
            f"{what} cannot be written to {folder}: a trial file of {num_bytes} bytes failed, {why}. Make room, or "
            "choose another folder (`quota` and `df -i` show limits that `df` does not)."
        ) from problem


def available_memory_bytes(proc: Path = Path("/proc")) -> int | None:
    """Memory that this process can still take: the node's, without swapping, within its control groups' limits.

    None where neither is told.
    """
    try:
        text = (proc / "meminfo").read_text(encoding="utf-8")
        found = re.search(r"^MemAvailable:\s+([0-9]+) kB", text, re.MULTILINE)
    except OSError:
        found = None
    told = [int(found[1]) * 1024 if found else None, cgroup_room_bytes(proc / "self")]
    return min((num_bytes for num_bytes in told if num_bytes is not None), default=None)


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path if path.is_dir() else path.parent

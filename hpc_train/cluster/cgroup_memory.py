"""How much memory the control groups of this process let it take: Slurm's of the job, a container's, a service's.

Who takes more than they allow is ended by the kernel without a word. The node's free memory does not tell of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Version:
    """Names of a version's files and of the numbers in its memory.stat.

    kills: the file that counts processes ended for want of memory; counts_below: also those of groups below it.
    """

    limit: str
    used: str
    cached: tuple[str, ...]
    kills: str
    counts_below: bool


# cited: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel; the sums of version 1 that
# include the groups below begin with total_.
_V1 = Version(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    kills="memory.oom_control",
    counts_below=False,
)
_V2 = Version(
    "memory.max", "memory.current", ("inactive_file", "active_file"), kills="memory.events", counts_below=True
)


def cgroup_room_bytes(proc: Path = Path("/proc/self")) -> int | None:
    """What the tightest of this process's control groups, or of those above it, has left; None: none has a limit.

    Copies of files that the kernel drops when it needs their room count as left.
    """
    rooms = [room for version, folder in memory_groups(proc) if (room := _room(version, folder)) is not None]
    return min(rooms, default=None)


def memory_groups(proc: Path, mountinfo: Path | None = None) -> Iterator[tuple[Version, Path]]:
    """The groups of a process that count memory, each after all above it that can be seen.

    proc: the process's folder in /proc. mountinfo: where another process is to see the groups; None: the process's own.
    """
    try:
        memberships = (proc / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (mountinfo or proc / "mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in memberships:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            version, mounted = _V2, _mounted(mounts, "cgroup2", None)
        elif "memory" in controllers.split(","):
            version, mounted = _V1, _mounted(mounts, "cgroup", "memory")
        else:
            continue
        if mounted is None:
            continue
        root, place = mounted
        inside = PurePosixPath(path)
        # In a container the mount may begin at the container's own group, or below it.
        below = inside.relative_to(root).parts if inside.is_relative_to(root) and ".." not in inside.parts else ()
        for depth in range(len(below) + 1):
            yield version, place.joinpath(*below[:depth])


def _mounted(mounts: list[str], kind: str, option: str | None) -> tuple[str, Path] | None:
    """Which group is mounted, and where."""
    for line in mounts:
        fields, _, tail = line.partition(" - ")
        words, told = fields.split(), tail.split()
        if len(words) >= 5 and len(told) >= 3 and told[0] == kind and (option is None or option in told[2].split(",")):
            return words[3], Path(words[4])
    return None


def _room(version: Version, folder: Path) -> int | None:
    try:
        limit = (folder / version.limit).read_text().strip()
        if limit == "max":
            return None
        used = int((folder / version.used).read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None  # the root has no such files
    cached = sum(
        int(found[1]) for name in version.cached if (found := re.search(rf"^{name} (\d+)$", stat, re.MULTILINE))
    )
    return max(0, int(limit) - max(0, used - cached))

"""How a process of this node ended, and whether the kernel was out of memory then: for whoever is not its parent."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpc_train.cluster.cgroup_memory import memory_groups

# cited: linux/pidfd.h, PIDFD_GET_INFO of the struct's first 64 bytes, PIDFD_INFO_EXIT and where exit_code is in it.
_GET_INFO, _INFO_BYTES, _WANTS_EXIT, _EXIT_CODE_AT = 0xC040FF0B, 64, 1 << 3, 60
# cited: proc_pid_stat(5), field 52, counted from the state, which is the first behind the command.
_EXIT_CODE_FIELD = 49
_KILLS = re.compile(r"^oom_kill ([0-9]+)$", re.MULTILINE)


def wait_status(pidfd: int, pid: int, proc: Path = Path("/proc")) -> int | None:
    """The status that a process which has ended gives its parent (see os.WIFSIGNALED); None where it is not known.

    Until its parent has waited for it the process is in /proc. Afterwards only the kernel's Linux 6.15 and later tell.
    """
    with suppress(OSError, IndexError):
        fields = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        if fields[0] in "ZX":
            return int(fields[_EXIT_CODE_FIELD])
    info = bytearray(_INFO_BYTES)
    struct.pack_into("Q", info, 0, _WANTS_EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return None
    (told,) = struct.unpack_from("Q", info, 0)
    return int(struct.unpack_from("i", info, _EXIT_CODE_AT)[0]) if told & _WANTS_EXIT else None


def describe_signal(number: int) -> str:
    """`signal 9 (SIGKILL)`."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def describe_status(status: int) -> str:
    """In words what a wait status says."""
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {describe_signal(-code)}" if code < 0 else f"ended with exit code {code}"


def memory_kills(pid: int, proc: Path = Path("/proc")) -> dict[Path, int]:
    """How many processes the kernel has killed for want of memory, by the files that count them for a process's cgroup.

    The cgroup's own file is first. With cgroup v2 those above it follow, which count what is below them too.
    """
    counts: dict[Path, int] = {}
    # As this process sees the groups: the other may be in a container.
    for version, folder in reversed(list(memory_groups(proc / str(pid), proc / "self" / "mountinfo"))):
        count = _read_kills(folder / version.kills)
        if count is not None:
            counts[folder / version.kills] = count
            if not version.counts_below:
                break
    return counts


def more_memory_kills(before: Mapping[Path, int]) -> int | None:
    """By how much the counts of `memory_kills` rose, by the first that can still be read; None: by none."""
    for path, count in before.items():
        now = _read_kills(path)
        if now is not None:
            return now - count
    return None


def _read_kills(path: Path) -> int | None:
    try:
        found = _KILLS.search(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return int(found[1]) if found else None

"""Find and end the processes that tests start, also those that left their session or lost their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on a descendant whose parent ends becomes a child of this process, so it stays in sight."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent's thread that started it ends, however that happens."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """Every living process below `root`, parents before children; what has ended but waits to be reaped is
    left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            state, parent = _state_and_parent(int(entry))
            if state not in ("Z", "X", ""):
                children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    frontier = [root]
    while frontier:
        frontier = [child for pid in frontier for child in children.get(pid, [])]
        found += frontier
    return found


def command_line(pid: int) -> str:
    """The command of a process, for messages; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def kill_tree(root: int) -> None:
    """Kill `root` and everything below it; a process that starts others meanwhile is caught as well."""
    for _ in range(20):
        pids = [*descendants(root), root]
        killed = [pid for pid in pids if _kill(pid)]
        if not killed or pids == [root]:
            return
        time.sleep(0.02)


def kill_all_below(root: int, *, keep: Iterable[int] = (), timeout_s: float = 10.0) -> list[str]:
    """Kill everything below `root` but `keep`; returns the command lines of what still lived."""
    keep = set(keep)
    seen: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while pids := [pid for pid in descendants(root) if pid not in keep]:
        for pid in pids:
            seen.setdefault(pid, command_line(pid))
            _kill(pid)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return [f"{pid}: {command}" for pid, command in seen.items()]


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        # The command in parentheses may itself hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[1])


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")

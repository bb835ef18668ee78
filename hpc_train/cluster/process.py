"""What /proc knows of this process and no environment variable can: which Slurm step holds it.

Slurm's variables are inherited. A script submitted from inside a step sees that step's SLURM_STEP_* and
PMI_* (seen with 22.05), and so does an salloc shell. The process tree cannot be inherited: each task is a
child of a slurmstepd that names its job and step in its title.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_STEPD_TITLE = re.compile(r"slurmstepd: \[([0-9]+)\.([0-9a-z+]+)\]")
_CGROUP = re.compile(r"/job_([0-9]+)/step_([0-9a-z]+)")
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "mksh", "tcsh", "csh", "fish"}


@dataclass(frozen=True)
class ProcessFacts:
    """Where this process stands in the process tree.

    held_by is `JOB.STEP` of the nearest slurmstepd above it (`7.0`, `7.batch`, `7.interactive`), or None:
    none was found, which proves nothing (containers and other mounts of /proc hide it).
    in_terminal_shell says that the task is a shell with a terminal (`srun --pty bash`), and this process
    was started from it.
    """

    held_by: str | None = None
    in_terminal_shell: bool = False


UNKNOWN_PROCESS = ProcessFacts()


def own_process() -> ProcessFacts:
    """Where the calling process stands."""
    return read_process(os.getpid())


def read_process(pid: int, proc: str = "/proc") -> ProcessFacts:
    """Walk from pid up to its slurmstepd. Never raises: what cannot be read is unknown."""
    root = Path(proc)
    chain = _ancestors(root, pid)
    titles = [_command_line(root, ancestor) for ancestor in chain]
    for position, title in enumerate(titles):
        match = _STEPD_TITLE.match(" ".join(title))
        if match:
            held_by = f"{match.group(1)}.{match.group(2)}"
            is_shell = position > 1 and _is_terminal_shell(root, chain[position - 1], titles[position - 1])
            return ProcessFacts(held_by, is_shell)
    return ProcessFacts(_step_of_cgroup(root, pid))


def _ancestors(root: Path, pid: int) -> list[int]:
    chain: list[int] = []
    while pid > 1 and pid not in chain:
        chain.append(pid)
        fields = _stat_fields(root, pid)
        pid = int(fields[1]) if len(fields) > 1 else 0
    return chain


def _stat_fields(root: Path, pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command name: state, parent, group, session, tty, ..."""
    try:
        text = (root / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _command_line(root: Path, pid: int) -> list[str]:
    try:
        raw = (root / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="replace").rstrip("\0").split("\0")


def _is_terminal_shell(root: Path, pid: int, command: list[str]) -> bool:
    fields = _stat_fields(root, pid)
    has_terminal = len(fields) > 4 and fields[4] not in ("0", "-1")
    name = command[0].rpartition("/")[2].lstrip("-") if command else ""
    only_options = all(word.startswith("-") and word != "-c" for word in command[1:])
    return has_terminal and name in _SHELLS and only_options


def _step_of_cgroup(root: Path, pid: int) -> str | None:
    try:
        text = (root / str(pid) / "cgroup").read_text(errors="replace")
    except OSError:
        return None
    match = _CGROUP.search(text)
    return f"{match.group(1)}.{match.group(2)}" if match else None

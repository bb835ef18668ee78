"""What srun or mpirun itself says while it sees ranks to their end: which task ended badly first, and how."""

from __future__ import annotations

import re
import signal
import threading
from collections import deque
from dataclasses import dataclass
from typing import Literal, final

from hpc_train.launch.follow import rank_of_line

# cited: srun says so of a step that Slurm itself ends.
SLURM_ENDED_IT = re.compile(r"CANCELLED AT .* DUE TO (PREEMPTION|TIME LIMIT|NODE FAILURE|JOB REQUEUE)")
# Seen: `srun: error: n2: task 5: Killed`, `srun: error: n[1-2]: tasks 0-3,5: Exited with exit code 1`.
_TASKS = r"[0-9]+(?:-[0-9]+)?"
_SRUN_TASKS = re.compile(rf"^srun: error: \S+: tasks? ({_TASKS}(?:,{_TASKS})*): (.+)$")
_SRUN_CODE = re.compile(r"Exited with exit code ([0-9]+)")
# cited: the help texts of Open MPI 4 and of PRRTE; the line is broken before the number.
_MPIRUN_SIGNAL = re.compile(
    r"noticed that process rank ([0-9]+) with PID [0-9]+ on node \S+ exited on\s+signal ([0-9]+)"
)
_LAST_LINES = 5
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.Signals}
_OUT_OF_MEMORY = "Out Of Memory"
_ASKED_FOR = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Signals by which somebody asks for an end."""


@dataclass(frozen=True)
class BadEnd:
    """The first tasks that ended badly, in the launcher's numbering, by a signal or with an exit code.

    By SIGKILL, with is_out_of_memory, where srun saw that memory was out.
    """

    says: Literal["srun", "mpirun"]
    tasks: tuple[int, ...]
    signal: int | None = None
    exit_code: int | None = None
    is_out_of_memory: bool = False

    @property
    def is_death(self) -> bool:
        """By a signal that nobody sends to ask for an end."""
        return self.signal is not None and self.signal not in _ASKED_FOR


@final
class LauncherWords:
    """Hears a launcher's lines as they come; lines of ranks are passed over."""

    def __init__(self) -> None:
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._slurm_ended_it: str | None = None
        self._before = ""
        self._lock = threading.Lock()
        self.first_bad_end: BadEnd | None = None

    def hear(self, line: bytes) -> None:
        if rank_of_line(line) is not None:
            return
        text = line.decode(errors="replace").rstrip()
        with self._lock:
            self._last.append(text)
            if self._slurm_ended_it is None and SLURM_ENDED_IT.search(text):
                self._slurm_ended_it = text
            if self.first_bad_end is None:
                self.first_bad_end = _srun_end(text) or _mpirun_end(f"{self._before}\n{text}")
            self._before = text

    @property
    def said(self) -> tuple[str, ...]:
        """The last lines, after the one in which Slurm says that it ended the step, however long ago that came."""
        with self._lock:
            first = [] if self._slurm_ended_it in (None, *self._last) else [str(self._slurm_ended_it)]
            return (*first, *self._last)


def _srun_end(line: str) -> BadEnd | None:
    match = _SRUN_TASKS.match(line)
    if match is None:
        return None
    tasks = _expand(match[1])
    how = match[2].removesuffix(" (core dumped)")
    if how == _OUT_OF_MEMORY:
        return BadEnd("srun", tasks, signal=int(signal.SIGKILL), is_out_of_memory=True)
    if code := _SRUN_CODE.fullmatch(how):
        return BadEnd("srun", tasks, exit_code=int(code[1]))
    number = _SIGNALS.get(how)
    return None if number is None else BadEnd("srun", tasks, signal=number)


def _mpirun_end(text: str) -> BadEnd | None:
    match = _MPIRUN_SIGNAL.search(text)
    return None if match is None else BadEnd("mpirun", (int(match[1]),), signal=int(match[2]))


def _expand(tasks: str) -> tuple[int, ...]:
    """`0-2,5` as numbers."""
    ends = [part.partition("-")[::2] for part in tasks.split(",")]
    return tuple(task for first, last in ends for task in range(int(first), int(last or first) + 1))

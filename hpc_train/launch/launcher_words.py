"""What srun or mpirun itself says while it sees ranks to their end: which tasks ended badly first, and how."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from hpc_train.launch.follow import rank_of_line

# cited: srun says so of a step that Slurm itself ends.
SLURM_ENDED_IT = re.compile(r"CANCELLED AT .* DUE TO (PREEMPTION|TIME LIMIT|NODE FAILURE|JOB REQUEUE)")
# cited: slurmstepd says so, on the step's first node or where memory was out. Without a reason behind the time it may
# only be that srun ends the others (seen), with TASK FAILURE it is that.
SAYS_ENDED = re.compile(r"CANCELLED AT .* DUE TO (?!TASK FAILURE)|exceeded .*memory limit|oom.kill", re.IGNORECASE)
# Seen: srun says so where it got SIGINT twice within a second, before it passes it on and ends the step.
SAYS_INTERRUPTED = re.compile(r"^srun: sending Ctrl-C to ")
# Seen: where slurmd cannot start a task, as beside a socket that a step of the job's last start has left.
NOT_LAUNCHED = re.compile(r"^srun: error: task ([0-9]+) launch failed: (.+)$")
# Seen: `srun: error: n2: task 5: Killed`, `srun: error: n[1-2]: tasks 0-3,5: Exited with exit code 1`.
_TASKS = r"[0-9]+(?:-[0-9]+)?"
_SRUN_TASKS = re.compile(rf"^srun: error: \S+: tasks? ({_TASKS}(?:,{_TASKS})*): (.+)$")
_SRUN_CODE = re.compile(r"Exited with exit code ([0-9]+)")
# cited: the help texts of Open MPI 4 and of PRRTE; the line is broken before the number.
_MPIRUN_SIGNAL = re.compile(
    r"noticed that process rank ([0-9]+) with PID [0-9]+ on node \S+ exited on\s+signal ([0-9]+)"
)
# Every help text of Open MPI's launchers has the name under which it was called.
_MPIRUN_SPEAKS = re.compile(r"\b(mpirun|mpiexec|prterun|prun|orterun|prte|PRTE|ORTE)\b")
_LAST_LINES = 5
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.Signals}
_OUT_OF_MEMORY = "Out Of Memory"
_ASKED_FOR = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Signals by which somebody asks for an end."""
_TOGETHER_S = 2.0
"""Ends within this time have one cause; assumed. Where srun ends the others for one that ended badly, it sends TERM,
which ranks outlive, and KILL after Slurm's KillWait, which is 30 s unless a site sets it."""


@dataclass(frozen=True)
class BadEnd:
    """The first tasks that ended badly, in the launcher's numbering, by a signal or with an exit code.

    By SIGKILL and SIGINT they are all that it ended at that time; is_out_of_memory: srun saw that memory was out for
    one of them.
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

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._slurm_ended_it: str | None = None
        self._says_interrupted: str | None = None
        self._says_ended: str | None = None
        self._not_launched: str | None = None
        self._before = ""
        self.has_mpirun_spoken = False
        self._lock = threading.Lock()
        self._bad_ends: list[tuple[float, BadEnd]] = []

    def hear(self, line: bytes) -> None:
        if rank_of_line(line) is not None:
            return
        text = line.decode(errors="replace").rstrip()
        with self._lock:
            self._last.append(text)
            self.has_mpirun_spoken = self.has_mpirun_spoken or _MPIRUN_SPEAKS.search(text) is not None
            if self._slurm_ended_it is None and SLURM_ENDED_IT.search(text):
                self._slurm_ended_it = text
            if self._says_interrupted is None and SAYS_INTERRUPTED.search(text):
                self._says_interrupted = text
            if self._says_ended is None and SAYS_ENDED.search(text):
                self._says_ended = text
            if self._not_launched is None and NOT_LAUNCHED.match(text):
                self._not_launched = text
            bad_end = _srun_end(text) or _mpirun_end(f"{self._before}\n{text}")
            if bad_end is not None:
                self._bad_ends.append((self._clock(), bad_end))
            self._before = text

    @property
    def first_bad_end(self) -> BadEnd | None:
        """Which tasks ended badly first; None: none, as far as the launcher says."""
        with self._lock:
            begin = self._bad_ends[0][0] if self._bad_ends else 0.0
            return _first_of([end for when, end in self._bad_ends if when <= begin + _TOGETHER_S])

    @property
    def said(self) -> tuple[str, ...]:
        """The last lines, after the one that says why the step was ended as a whole, however long ago that came."""
        with self._lock:
            told = self._slurm_ended_it or self._says_interrupted or self._says_ended or self._not_launched
            first = [] if told in (None, *self._last) else [str(told)]
            return (*first, *self._last)


def _first_of(together: Sequence[BadEnd]) -> BadEnd | None:
    """The one of these that came first, with all that were killed or interrupted where it was.

    An abort is passed over where another task was killed: libraries abort ranks that have lost others.
    """
    if not together:
        return None
    first = together[0]
    if first.signal == signal.SIGABRT:
        first = next((end for end in together if end.is_death and end.signal != signal.SIGABRT), first)
    if first.signal not in (signal.SIGKILL, signal.SIGINT):
        return first
    alike = [end for end in together if end.signal == first.signal]
    tasks = tuple(task for end in alike for task in end.tasks)
    return replace(first, tasks=tasks, is_out_of_memory=any(end.is_out_of_memory for end in alike))


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

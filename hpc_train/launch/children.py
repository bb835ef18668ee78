"""Child processes of a driver: started so that none outlives it, waited for, stopped in steps.

A child is in a session of its own, so that Ctrl-C on a terminal reaches the driver alone, which then says how
the ranks end. The kernel ends the child when the driver is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Literal

from hpc_train.errors import LaunchError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""Go to the ranks as they are, unless one of them is the stop signal."""
GRACE_S = 5.0
"""From TERM to the next harder way to end a child; assumed: ranks that ignore TERM for longer are stuck."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def start_child(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    close_fds: bool = True,
    own: Literal["session", "group"] = "session",
    death_signal: int = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start a program that gets `death_signal` when this process ends, whatever ends it.

    It is the first of a session of its own, or of a process group: Slurm's process tracking by sessions does
    not see what has left the step's.

    Call it from the main thread: the kernel's promise is bound to the thread that started the child.

    Raises:
        LaunchError: the program cannot be started.
    """
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    try:
        return subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            close_fds=close_fds,
            start_new_session=own == "session",
            process_group=0 if own == "group" else None,
            preexec_fn=prepare,
        )
    except OSError as problem:
        raise LaunchError(f"{argv[0]} cannot be started: {problem.strerror}") from problem


def end_with_parent(death_signal: int = signal.SIGTERM) -> None:
    """Have the kernel send `death_signal` to this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that `end_descendants` finds them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(keep: Sequence[int] = ()) -> int:
    """Kill every process below this one but those in `keep`; returns how many there were."""
    ended: set[int] = set()
    for _ in range(50):
        found = [pid for pid in descendants(os.getpid()) if pid not in keep]
        if not found:
            break
        for pid in found:
            ended.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return len(ended)


def descendants(root: int) -> list[int]:
    """Living processes below `root`; those that wait to be reaped are left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = (
                    Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                )
            except OSError:
                continue
            if fields[0] not in "ZX":
                children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    frontier = [root]
    while frontier:
        frontier = [child for pid in frontier for child in children.get(pid, [])]
        found += frontier
    return found


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; not by a debugger, which lets it go on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"


class Stopper:
    """Asks one child to end, or ends it in steps, and remembers what happened.

    stop_signal: what the child's ranks understand as "save and end", sent on the first signal but SIGINT, which ends
    them at once; None: they understand nothing. `steps` are called one after another, GRACE_S apart, until it ends.
    reason: why `stop` ended it. asked: the signal that asked for an end with a save. forced: the one that did not wait.
    """

    def __init__(
        self, child: subprocess.Popen[bytes], steps: Sequence[Callable[[], None]], stop_signal: int | None = None
    ) -> None:
        self._child = child
        self._steps = steps
        self._stop_signal = stop_signal
        self._end_now = threading.Event()
        self.reason: str | None = None
        self.asked: str | None = None
        self.forced: str | None = None
        threading.Thread(target=self._run, name="stopper", daemon=True).start()

    def stop(self, reason: str) -> None:
        """Begin to end the child; returns at once."""
        self.reason = self.reason or reason
        self._end()

    def _end(self) -> None:
        self._end_now.set()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        name = signal.Signals(number).name
        if number in PASSED_ON and number != self._stop_signal:
            self._child.send_signal(number)
        elif self._stop_signal is not None and number != signal.SIGINT:
            # Slurm sends TERM more than once, to us and by our script: a repeat must not cut the save short.
            if self.asked is None:
                self.asked = f"the driver got {name}"
                self._child.send_signal(self._stop_signal)
        else:
            self.forced = self.forced or f"the driver got {name}" + (" as well" if self.asked else "")
            self._end()

    def _run(self) -> None:
        self._end_now.wait()
        for step in self._steps:
            if self._child.poll() is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                step()
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline and self._child.poll() is None:
                time.sleep(0.05)


def stop_steps(child: subprocess.Popen[bytes], *, is_srun: bool, term_saves: bool = False) -> list[Callable[[], None]]:
    """How a launcher is ended: TERM, which it passes to its ranks; then what it offers; then KILL.

    term_saves: its ranks would save first if TERM came, so they are killed in its place: mpirun's here, srun's by INT,
    which ends them.
    """

    def kill_ranks() -> None:
        for pid in descendants(child.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def term() -> None:
        child.send_signal(signal.SIGTERM)

    def interrupt_twice() -> None:
        # cited: srun(1): two SIGINT within a second make srun end all tasks, by KILL in the end.
        child.send_signal(signal.SIGINT)
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)

    def kill_group() -> None:
        os.killpg(child.pid, signal.SIGKILL)

    first = [] if term_saves else [term]
    if is_srun:
        return [*first, interrupt_twice, kill_group]
    return [kill_ranks, term, kill_group] if term_saves else [term, kill_group]


class Interrupted(KeyboardInterrupt):
    """A signal but Ctrl-C's asked this process to end."""


@contextlib.contextmanager
def terminations_raise(stop_signal: int = signal.SIGTERM) -> Iterator[None]:
    """While inside, SIGTERM, SIGHUP and stop_signal end this process as Ctrl-C does, so that clean-up runs."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(f"got {signal.Signals(number).name}")

    numbers = {signal.SIGTERM, signal.SIGHUP, stop_signal}
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def signals_go_to(handler: Callable[[int, FrameType | None], None], stop_signal: int | None) -> Iterator[None]:
    """While inside, the signals that end, stop or are passed on call `handler`."""
    numbers = {*STOP_SIGNALS, *PASSED_ON, *([stop_signal] if stop_signal is not None else [])}
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)

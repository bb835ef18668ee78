"""Python stacks of a rank on request: what the rank prepares, and how its file is found and read.

A rank opens a nameless file in memory and has faulthandler write all threads' stacks into it when a signal comes.
The handler needs no lock of Python's, so a rank that hangs inside a library answers too. The file begins with a line
of JSON that says who the rank is; whoever may read /proc/PID/fd of the rank can read it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STACK_SIGNAL = signal.SIGRTMIN + 6
"""Assumed to be free: a Java machine in the process (libhdfs) takes SIGQUIT, submitit and users USR1 and USR2."""

_FILE_NAME = "hpc_train_stacks"
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[.*\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str


@dataclass(frozen=True)
class ThreadStack:
    """Frames of one thread, innermost first."""

    is_main: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class StackFile:
    """The file of a live rank, as a path that can be opened, and what its first line says."""

    path: Path
    pid: int
    rank: int | None
    node: str
    run_dir: str
    main_thread: str
    header_bytes: int


def answer_stack_requests(run_dir: Path, rank: int | None, node: str) -> None:
    """From now on STACK_SIGNAL has this process write its stacks, and go on. `rank`: the planned one."""
    descriptor = os.memfd_create(_FILE_NAME)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    # Appending, so that whoever reads may empty the file between two requests.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
    header = {
        "pid": os.getpid(),
        "rank": rank,
        "node": node,
        "run_dir": str(run_dir),
        "main_thread": f"{threading.main_thread().ident:#018x}",
    }
    os.write(descriptor, json.dumps(header).encode() + b"\n")
    faulthandler.register(STACK_SIGNAL, descriptor, all_threads=True)
    # cited: prctl(2), Yama. py-spy and gdb of the same user may then look at a rank that cannot answer by itself.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def find_stack_files(run_dir: Path, node: str, proc: Path = Path("/proc")) -> list[StackFile]:
    """The files of this node's ranks of a run; on a simulated cluster one machine is several nodes."""
    folder = os.path.realpath(run_dir)
    found = []
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            file = read_stack_file(int(entry.name), proc)
            if file is not None and file.node == node and os.path.realpath(file.run_dir) == folder:
                found.append(file)
    return sorted(found, key=lambda file: (file.rank is None, file.rank, file.pid))


def read_stack_file(pid: int, proc: Path = Path("/proc")) -> StackFile | None:
    """The file that a process opened itself; None where it has none, or only its parent's."""
    folder = proc / str(pid) / "fd"
    try:
        descriptors = list(folder.iterdir())
    except OSError:
        return None
    for path in descriptors:
        try:
            if not os.readlink(path).startswith(f"/memfd:{_FILE_NAME}"):
                continue
            with path.open("rb") as file:
                line = file.readline(65536)
            header = json.loads(line)
            if header["pid"] == _own_pid(proc / str(pid)):
                names = {name: header[name] for name in ("rank", "node", "run_dir", "main_thread")}
                return StackFile(path=path, pid=pid, header_bytes=len(line), **names)
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return None


@contextlib.contextmanager
def emptied(file: StackFile) -> Iterator[int]:
    """The file open for reading, without earlier answers; held against others that ask the same rank meanwhile.

    Raises:
        OSError: the process is gone, or somebody else is asking it (BlockingIOError).
    """
    descriptor = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, file.header_bytes)
        yield descriptor
    finally:
        os.close(descriptor)


def read_answer(file: StackFile, descriptor: int) -> str:
    """What the rank has written since the file was emptied."""
    size = os.fstat(descriptor).st_size - file.header_bytes
    return os.pread(descriptor, max(size, 0), file.header_bytes).decode(errors="replace")


def parse_stacks(text: str, main_thread: str) -> tuple[ThreadStack, ...]:
    """The threads of an answer, the main thread first; lines that are no frames are left out."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if match := _THREAD.fullmatch(line):
            threads.append((match[1], []))
        elif (match := _FRAME.fullmatch(line)) and threads:
            number = int(match[2]) if match[2].isdecimal() else 0
            threads[-1][1].append(Frame(match[1], number, match[3]))
    stacks = [ThreadStack(int(name, 16) == int(main_thread, 16), tuple(frames)) for name, frames in threads]
    return tuple(sorted(stacks, key=lambda stack: not stack.is_main))


def catches_signal(pid: int, number: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process has a handler for a signal; false where that cannot be seen."""
    caught = status_field(pid, "SigCgt", proc)
    return caught is not None and bool(int(caught, 16) >> (number - 1) & 1)


def process_state(pid: int, proc: Path = Path("/proc")) -> str | None:
    """The letter of proc(5): R, S, D, T, t, Z; None if the process is gone."""
    state = status_field(pid, "State", proc)
    return state[0] if state else None


def status_field(pid: int, name: str, proc: Path = Path("/proc")) -> str | None:
    """A line of /proc/PID/status without its name."""
    try:
        lines = (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), None)


def read_environment(pid: int, proc: Path = Path("/proc")) -> dict[str, str]:
    """The variables with which a process of the same user was started; empty for any other."""
    try:
        words = (proc / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (word.decode(errors="replace").partition("=") for word in words)
    return {name: value for name, _, value in pairs}


def _own_pid(process: Path) -> int:
    """What os.getpid() gives inside the process, which may be in a pid namespace of its own."""
    numbers = status_field(int(process.name), "NSpid", process.parent)
    return int(numbers.split()[-1]) if numbers else int(process.name)

"""Output of every process: lines written whole, prefixed with time, host and rank; one first-failure record.

Many ranks write into one file a node, so a line goes out by a single write and carries its origin. The
record `failure.json` holds the first failure of an attempt: whoever creates it first wins, and the creation
order is the file system's, so clocks of different nodes do not matter. Whoever only lost another rank waits first
for the record of that one's end.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from hpc_train.errors import ExitCode, HpcTrainError

FAILURE_FILE = "failure.json"
FOLLOWS_S = 2.0
"""How long a cause is waited for; assumed: an agent records an end in milliseconds, in a second on slow files."""
_FIRST_PAUSE_S = 0.05
"""Doubled at each look: all ranks of a large run look at once, and a file system should not suffer from that."""


class FailureKind(StrEnum):
    """Who says what: a rank of itself; whoever watched one that said nothing; a rank that lost another one.

    OUTSIDE: the driver, of all ranks: something outside ended them together, and none has failed.
    """

    OWN = "own"
    ENDED = "ended"
    FOLLOWS = "follows"
    OUTSIDE = "outside"


class LineWriter(io.TextIOBase):
    """A text stream that passes on whole lines, each in one write, each with a prefix, to one file or several.

    A line that is still open when `flush` is called stays in the buffer: half lines of several ranks in one
    file could not be told apart. It goes out at its line end or at `close`. Threads have a buffer each.
    """

    def __init__(self, file_descriptor: int, label: str) -> None:
        self._file_descriptor = file_descriptor
        self._copies: list[int] = []
        self._label = label
        self._open_lines: dict[int, str] = {}

    def write(self, text: str) -> int:
        thread = threading.get_ident()
        *lines, open_line = (self._open_lines.pop(thread, "") + text).split("\n")
        if open_line:
            self._open_lines[thread] = open_line
        for line in lines:
            self._emit(line.rpartition("\r")[2] if not line.endswith("\r") else line[:-1])
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file_descriptor

    def flush(self) -> None:
        """Nothing to do: whole lines are out already."""

    def close(self) -> None:
        while self._open_lines:
            _, line = self._open_lines.popitem()
            self._emit(line)

    def copy_to(self, file_descriptor: int) -> None:
        """Write every line there as well. A copy that cannot be written is given up."""
        self._copies.append(file_descriptor)

    def _emit(self, line: str) -> None:
        data = f"{timestamp()} {self._label} | {line}\n".encode(errors="replace")
        for copy in tuple(self._copies):
            try:
                _write_all(copy, data)
            except OSError:
                self._copies.remove(copy)
        _write_all(self._file_descriptor, data)


def _write_all(file_descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(file_descriptor, data) :]


def timestamp() -> str:
    """Local time to the millisecond: 2026-11-29T22:10:03.123."""
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now)) + f".{int(now * 1000) % 1000:03d}"


def prefix_output(rank: int, host: str) -> None:
    """From now on, every line that Python code of this process prints carries time, host and rank."""
    label = f"{host} r{rank}"
    sys.stdout, sys.stderr = LineWriter(1, label), LineWriter(2, label)


def copy_output(path: Path) -> None:
    """From now on, lines that Python code of this process prints also go to the end of this file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, LineWriter), "prefix_output comes first"
        stream.copy_to(descriptor)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a message, whole lines at once."""
    out = stream or sys.stdout
    out.write(text + "\n")
    out.flush()


def warn(text: str) -> None:
    """Print a warning to standard error, once, in the words given."""
    say(f"warning: {text}", sys.stderr)


def report_failure(
    error: BaseException,
    *,
    run_dir: Path | None,
    rank: int | None,
    host: str,
    kind: FailureKind = FailureKind.OWN,
    patience_s: float = FOLLOWS_S,
) -> int:
    """Print an error with its rank and host, record it if it is the first one, and give the exit code.

    An error that is the user's to mend is shown as its message; anything else with its traceback. Never
    raises: a full disk must not hide the error that led here.

    kind: of an error that follows from another, the other's record is waited for, for up to patience_s.
    """
    expected = isinstance(error, HpcTrainError)
    exit_code = int(error.exit_code) if isinstance(error, HpcTrainError) else int(ExitCode.INTERNAL)
    trace = "".join(traceback.format_exception(error))
    cause = None
    if kind is FailureKind.FOLLOWS and run_dir is not None:
        cause = wait_for_failure(run_dir, patience_s)
    after = f", after that of {origin_of(cause)}" if cause is not None else ""
    where = origin_of({"rank": rank, "host": host})
    try_to_say(f"error ({where}, exit code {exit_code}{after}): {error if expected else trace.rstrip()}")
    if run_dir is not None and cause is None:
        message = str(error) or type(error).__name__
        record_failure(run_dir, rank=rank, host=host, exit_code=exit_code, message=message, kind=kind, trace=trace)
    return exit_code


def failure_record(
    *,
    rank: int | None,
    host: str | None,
    exit_code: int,
    message: str,
    kind: FailureKind,
    trace: str = "",
    returncode: int | None = None,
    when: str | None = None,
) -> dict[str, Any]:
    """What `failure.json` holds.

    returncode: of a process that ended without a word, its exit code or, negative, the signal that ended it. when:
    None for now.
    """
    return {
        "rank": rank,
        "host": host,
        "time": timestamp() if when is None else when,
        "exit_code": exit_code,
        "message": message,
        "kind": str(kind),
        "returncode": returncode,
        "traceback": trace,
    }


def record_failure(
    run_dir: Path,
    *,
    rank: int | None,
    host: str,
    exit_code: int,
    message: str,
    kind: FailureKind,
    trace: str = "",
    returncode: int | None = None,
) -> None:
    """Put a failure on record, if it is the first one of the attempt; see `failure_record`."""
    record = failure_record(
        rank=rank, host=host, exit_code=exit_code, message=message, kind=kind, trace=trace, returncode=returncode
    )
    # Written whole under a name of its own, then linked: the link fails if another was first.
    temporary = run_dir / f".{FAILURE_FILE}.{host}.{os.getpid()}.{threading.get_native_id()}"
    try:
        temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
        os.link(temporary, run_dir / FAILURE_FILE)
    except FileExistsError:
        return
    except OSError as problem:
        try_to_say(f"warning: the failure could not be recorded in {run_dir}: {problem}")
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def try_to_say(text: str) -> None:
    """Print to standard error, which may be a file on the disk that is full."""
    with suppress(OSError):
        say(text, sys.stderr)


def wait_for_failure(run_dir: Path, patience_s: float = FOLLOWS_S) -> dict[str, object] | None:
    """The first failure of the running attempt, once it is on record, or None after patience_s."""
    deadline, pause_s = time.monotonic() + patience_s, _FIRST_PAUSE_S
    while (record := read_failure(run_dir)) is None and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s *= 2
    return record


def read_failure(run_dir: Path) -> dict[str, object] | None:
    """The first failure of the running attempt, or None."""
    try:
        record = json.loads((run_dir / FAILURE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def kind_of(failure: Mapping[str, object]) -> FailureKind:
    """What kind of record it is."""
    told = failure.get("kind")
    return next((kind for kind in FailureKind if kind == told), FailureKind.OWN)


def origin_of(failure: Mapping[str, object]) -> str:
    """`rank 3 on n2`, or the host alone where no rank is known; or `all ranks`."""
    if kind_of(failure) is FailureKind.OUTSIDE:
        return "all ranks"
    rank, host = failure.get("rank"), failure.get("host")
    return f"{host}" if rank is None else f"rank {rank} on {host}"

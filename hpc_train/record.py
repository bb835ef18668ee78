"""What is timed in a step: segments by name, the clock that marks them, and a recorder that does nothing.

A segment is a piece of this rank's time with a name: a forward, a collective, the optimizer. Communication has three
marks: when it was begun, when the rank had nothing else to do and began to wait for it, and when it was over. What
writes segments to files is `train.trace`; what reads them is `observe`. The format that both share is here.
"""

from __future__ import annotations

import json
import math
import re
import time
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

COLUMNS = ("name", "begin", "wait", "end", "micro_batch", "model_chunk", "peer", "ordinal", "bytes")
"""Of a row in a trace file, int64 each, -1 where there is none.

name: index into the names told so far. begin, wait, end: ns of the node's monotonic clock. peer: global rank of a send
or receive. ordinal: the how-many-eth of its name and peer since the recorder began, from 0, by which the ranks' rows
are matched: a transfer that is begun in one step and awaited in the next has one number.
"""
TRACE_FOLDER = "trace"
CLOCK_FILE = "clock.json"


def attempt_folder(attempt: int) -> str:
    return f"attempt_{attempt:04d}"


def attempts_in(trace_folder: Path) -> list[int]:
    """Which attempts have a folder there, in their order."""
    names = [re.fullmatch(r"attempt_([0-9]+)", path.name) for path in trace_folder.glob("attempt_*") if path.is_dir()]
    return sorted(int(name[1]) for name in names if name is not None)


def rank_trace_file(rank: int) -> str:
    return f"rank_{rank:05d}.trace"


def ranks_in(attempt_folder: Path) -> list[int]:
    """Which ranks have a trace file there, in their order."""
    names = [re.fullmatch(r"rank_([0-9]+)\.trace", path.name) for path in attempt_folder.glob("rank_*.trace")]
    return sorted(int(name[1]) for name in names if name is not None)


def sealed_line(values: Mapping[str, Any]) -> bytes:
    """A line of JSON with its checksum behind it, by which a reader tells damage."""
    text = json.dumps(values, allow_nan=False).encode()
    return b"%s %08x\n" % (text, zlib.crc32(text))


def unsealed(line: bytes) -> dict[str, Any] | None:
    """The values of a line with its checksum; None where it is not as it was written."""
    text, _, checksum = line.rstrip(b"\n").rpartition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


class Kind(StrEnum):
    """Of what a segment is."""

    STEP = "step"
    COMPUTE = "compute"
    DATA = "data"
    SAVE = "save"
    COLLECTIVE = "collective"
    SEND = "send"
    RECEIVE = "receive"


COMMUNICATION = (Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE)


@dataclass(frozen=True)
class Name:
    """What rows refer to. group, first_rank, group_size: of communication only, and the same on all of the group."""

    label: str
    kind: Kind
    group: str = ""
    first_rank: int = -1
    group_size: int = 0


class Clock(ABC):
    """Marks moments, each by a number that may need `resolve` before it is a time."""

    @abstractmethod
    def mark(self) -> int:
        """Now, in the order of this rank's work."""

    @abstractmethod
    def anchor(self) -> None:
        """Compare with the host's clock; called where the device has nothing left to do."""

    @abstractmethod
    def resolve(self, marks: Sequence[int]) -> list[int]:
        """Times of marks in ns of the host's monotonic clock; may block until they have passed. Once for each."""

    @abstractmethod
    def forget(self, marks: Sequence[int]) -> None:
        """These marks are not resolved any more."""


class HostClock(Clock):
    """The monotonic clock of this machine, the same for all its processes; marks are times."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def anchor(self) -> None:
        pass

    def resolve(self, marks: Sequence[int]) -> list[int]:
        return list(marks)

    def forget(self, marks: Sequence[int]) -> None:
        pass


class Segment:
    """A piece of time that has begun; this one is not recorded. As a context manager it ends with the block."""

    __slots__ = ()

    def begin_wait(self) -> None:
        """From here on this rank does nothing but wait for it."""

    def end(self) -> None:
        """It is over. Called once."""

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


class Recorder(ABC):
    """Takes segments of one rank."""

    @abstractmethod
    def step(self, number: int) -> Segment:
        """One optimizer update; what follows belongs to it until the next."""

    @abstractmethod
    def segment(
        self, label: str, kind: Kind = Kind.COMPUTE, *, micro_batch: int = -1, model_chunk: int = -1
    ) -> Segment:
        """Begin work of this rank; it ends before what was begun ahead of it."""

    @abstractmethod
    def communication(
        self, kind: Kind, operation: str, group: str, ranks: tuple[int, ...], num_bytes: int, peer: int = -1
    ) -> Segment:
        """Begin a transfer; others may be begun and end meanwhile.

        Without `begin_wait` the rank waits for it from the beginning.

        Args:
            group, ranks: The group's name and its global ranks.
            peer: Global rank of the other side of a send or receive.
        """

    @abstractmethod
    def anchor(self) -> None:
        """The device has nothing left to do: a good moment to compare its clock with the host's."""

    @abstractmethod
    def close(self) -> None:
        """Nothing comes any more; return when all is written, or is known not to be."""


NO_SEGMENT = Segment()


class NoRecorder(Recorder):
    """Records nothing."""

    def step(self, number: int) -> Segment:
        return NO_SEGMENT

    def segment(
        self, label: str, kind: Kind = Kind.COMPUTE, *, micro_batch: int = -1, model_chunk: int = -1
    ) -> Segment:
        return NO_SEGMENT

    def communication(
        self, kind: Kind, operation: str, group: str, ranks: tuple[int, ...], num_bytes: int, peer: int = -1
    ) -> Segment:
        return NO_SEGMENT

    def anchor(self) -> None:
        pass

    def close(self) -> None:
        pass


NOT_RECORDED = NoRecorder()
"""Without state, so that one value serves all."""


def quotient(amount: float | None, whole: float | None) -> float | None:
    """amount / whole; None where the whole is no positive number, since neither 0 nor infinity would be true.

    So of every rate and share that is reported, whatever a clock did.
    """
    if amount is None or whole is None or not math.isfinite(amount) or not math.isfinite(whole) or whole <= 0:
        return None
    return amount / whole


def times_of(rows: array[int]) -> tuple[int, ...]:
    """The marks in rows that lie one behind the other: of each its begin, wait and end."""
    width = len(COLUMNS)
    return tuple(rows[start + column] for start in range(0, len(rows), width) for column in (1, 2, 3))

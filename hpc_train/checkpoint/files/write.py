"""Write a rank's file, and other files that are written again under another name where a store loses one.

Needs no torch: ranks and node agents write by the same code.
"""

from __future__ import annotations

import shutil
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from hpc_train.checkpoint.format.archive import archive_of
from hpc_train.checkpoint.format.placed import PlacedBox, WrittenBox
from hpc_train.checkpoint.stores.cause import StoreError, StoreHang
from hpc_train.checkpoint.stores.location import Location
from hpc_train.errors import CheckpointError

T = TypeVar("T")

_BLOCK_BYTES = 4 << 20
"""Written at once; assumed: its checksum is taken while it is in a CPU's cache, and calls cost nothing."""
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0)
"""Before each further attempt: three of them after the 30 s in which a name node that avoids stale data nodes comes to
avoid a dead one (cited: hdfs-default.xml), all within the time that ranks wait for one another."""


class Abandoned(CheckpointError):
    """The save was given up while it was written."""


_LONGEST_SLEEP_S = 0.5
"""After which one who waits for his turn looks whether he still has to; assumed: short beside any save."""


class Flow:
    """Lets bytes through, at no more than a rate where there is one; counts them, and can be stopped. For any threads.

    bytes_per_s: None: without limit. moved_at: when bytes went through, or waited for the rate, last.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._reason: str | None = None
        self.num_bytes = 0
        self.moved_at = clock()

    def pass_through(self, num_bytes: int) -> None:
        """Wait until so many more bytes may be written.

        Raises:
            Abandoned: `stop` was called.
        """
        self.check()
        self.moved_at = self._clock()
        with self._lock:
            self.num_bytes += num_bytes
            if self._bytes_per_s is None:
                return
            begin = max(self._clock(), self._free_at)
            self._free_at = begin + num_bytes / self._bytes_per_s
        while self._reason is None and self._bytes_per_s is not None and (left_s := begin - self._clock()) > 0:
            self._sleep(min(left_s, _LONGEST_SLEEP_S))
            self.moved_at = self._clock()
        self.check()

    def check(self) -> None:
        """Raises Abandoned after `stop`."""
        if self._reason is not None:
            raise Abandoned(self._reason)

    def hurry(self) -> None:
        """From now on there is no rate."""
        self._bytes_per_s = None

    def stop(self, reason: str) -> None:
        self._reason = self._reason or reason


def write_boxes(
    place: Location, placed: Sequence[PlacedBox], raw_bytes: Callable[[int], memoryview], flow: Flow
) -> list[WrittenBox]:
    """Write a new file of boxes from beginning to end; it is durable then.

    raw_bytes: gives the memory of a box by its number; asked for one after another.
    """
    written = []
    with place.writing() as file:
        for number, box in enumerate(placed):
            archive, data = archive_of(box.dtype, box.sizes), raw_bytes(number)
            if len(data) != archive.num_bytes:
                raise CheckpointError(f"{box.name}: there are {len(data)} bytes, and {archive.num_bytes} are needed")
            file.write(memoryview(archive.head))
            crc32 = 0
            for start in range(0, len(data), _BLOCK_BYTES):
                block = data[start : start + _BLOCK_BYTES]
                flow.pass_through(len(block))
                crc32 = zlib.crc32(block, crc32)
                file.write(block)
            file.write(memoryview(archive.tail(crc32)))
            written.append(WrittenBox(box, crc32))
    return written


def write_new_file(
    target: Location,
    write: Callable[[Location], T],
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Have `write` make a file; where the store fails in a way that may pass, again under other names.

    A file that failed is never opened again, since nobody knows what of it arrived and who holds its lease. The one
    that went well gets the name of `target`.

    Raises:
        StoreError: it fails in a way that does not pass, or has failed too often, or does not answer.
    """
    place = target
    for attempt, pause_s in enumerate((*_PAUSES_S, None), start=1):
        try:
            value = write(place)
            break
        except StoreHang:
            raise
        except StoreError as problem:
            with suppress(StoreError):
                place.remove()
            if pause_s is None or problem.cause is None or not problem.cause.may_pass:
                raise
            say(f"{target.name} is written again under another name, in {pause_s:g} s: {problem}")
        sleep(pause_s)
        place = target.parent / f"{target.name}.again-{attempt}"
    if place != target:
        target.remove()
        place.rename(target)
    return value


def in_words(problem: BaseException, root: Location) -> str:
    """The problem, and the space left where it may be the cause; of what is gone, who may have removed it."""
    text = f"{type(problem).__name__}: {problem}"
    if isinstance(problem, FileNotFoundError):
        return (
            f"{text}. {root}, or what was being written in it, was removed or unmounted meanwhile; restore or mount "
            "it, and start again"
        )
    try:
        free = shutil.disk_usage(root.local).free if root.local is not None else None
    except OSError:
        free = None
    return text if free is None else f"{text} ({free / 2**20:.1f} MiB are free at {root})"

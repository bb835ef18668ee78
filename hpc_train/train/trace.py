"""Records this rank's segments: NVTX ranges of their names, and rows in a file that a thread writes.

1. a segment's end adds its row to a buffer: integers alone, no text is made
2. a step's end hands the buffer to the thread; where the thread is behind by many buffers, the buffer is dropped
3. the thread resolves marks into times and appends a block: a line of JSON, then the rows; both with a checksum
4. closing appends a block without rows, by which a reader knows that nothing is missing

What is beyond the cap, or was not written, is counted, and the count is in every block.
"""

from __future__ import annotations

import queue
import sys
import threading
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nvtx

from hpc_train.log import warn
from hpc_train.record import COLUMNS, Clock, Kind, Name, Recorder, Segment, sealed_line, times_of

# Assumed: a step's rows are some 100, so that a full queue is seconds of a file system that does not answer.
_MAX_WAITING_BLOCKS = 64
# Rows that are handed over before a step's end (assumed: 4096 rows are 300 kB).
_ROWS_A_BLOCK = 4096
_CLOSE_TIMEOUT_S = 20.0
_WIDTH = len(COLUMNS)


class TraceRecorder(Recorder):
    """Writes the segments of chosen steps up to a number of rows; NVTX ranges are made of all."""

    def __init__(
        self,
        path: Path,
        facts: Mapping[str, Any],
        clock: Clock,
        *,
        max_rows: int,
        steps: tuple[int, int] | None = None,
        domain: Any = None,
    ) -> None:
        """Begin a file of this rank's.

        Args:
            facts: What its first line says of the rank.
            max_rows: Rows that are written; 0 for none.
            steps: First and last step that are written; None for all.
            domain: NVTX's; left out, `hpc_train`.
        """
        self._clock, self._steps, self._max_rows = clock, steps, max_rows
        self._domain = nvtx.get_domain("hpc_train") if domain is None else domain
        self._ids: dict[tuple[str, str], int] = {}
        self._names: list[Name] = []
        self._ranges: list[Any] = []
        self._counts: dict[tuple[int, int], int] = {}
        self._rows = array("q")
        self._step, self._is_on = 0, False
        self._num_rows, self._num_new_names = 0, 0
        self._dropped = 0
        self._writer = _Writer(path, facts, clock)

    @property
    def num_dropped(self) -> int:
        """Segments of chosen steps that are in no file."""
        return self._dropped + self._writer.num_dropped

    def step(self, number: int) -> Segment:
        self._hand_over()
        self._step = number
        self._is_on = self._steps is None or self._steps[0] <= number <= self._steps[1]
        return self.segment("step", Kind.STEP)

    def segment(
        self, label: str, kind: Kind = Kind.COMPUTE, *, micro_batch: int = -1, model_chunk: int = -1
    ) -> Segment:
        name = self._ids.get((label, ""))
        if name is None:
            name = self._new_name(label, Name(label, kind))
        return _Recorded(self, name, True, micro_batch, model_chunk, -1, -1, -1)

    def communication(
        self, kind: Kind, operation: str, group: str, ranks: tuple[int, ...], num_bytes: int, peer: int = -1
    ) -> Segment:
        name = self._ids.get((operation, group))
        if name is None:
            label = f"{group} {operation}"
            name = self._new_name(operation, Name(label, kind, group, ranks[0], len(ranks)))
        count = self._counts.get((name, peer), 0)
        self._counts[name, peer] = count + 1
        return _Recorded(self, name, False, -1, -1, peer, count, num_bytes)

    def anchor(self) -> None:
        self._clock.anchor()

    def close(self) -> None:
        self._hand_over()
        self._writer.close(self._step, self._dropped)

    def _new_name(self, operation: str, name: Name) -> int:
        number = self._ids[operation, name.group] = len(self._names)
        self._names.append(name)
        self._ranges.append(self._domain.get_event_attributes(message=name.label))
        return number

    def _add(self, row: tuple[int, ...]) -> None:
        if not self._is_on:
            self._clock.forget(row[1:4])
        elif self._num_rows >= self._max_rows:
            self._dropped += 1
            self._clock.forget(row[1:4])
        else:
            self._rows.extend(row)
            self._num_rows += 1
            if len(self._rows) >= _ROWS_A_BLOCK * _WIDTH:
                self._hand_over()

    def _hand_over(self) -> None:
        if not self._rows:
            return
        names, self._num_new_names = self._names[self._num_new_names :], len(self._names)
        rows, self._rows = self._rows, array("q")
        self._writer.put(self._step, rows, names, self._dropped)


class _Recorded(Segment):
    __slots__ = ("_begin", "_is_nested", "_range", "_recorder", "_row_end", "_row_name", "_wait")

    def __init__(self, recorder: TraceRecorder, name: int, is_nested: bool, *row_end: int) -> None:
        self._recorder, self._row_name, self._row_end, self._is_nested = recorder, name, row_end, is_nested
        # Ranges of a thread's stack nest; transfers need not.
        if is_nested:
            recorder._domain.push_range(recorder._ranges[name])
        else:
            self._range = recorder._domain.start_range(recorder._ranges[name])
        self._begin = self._wait = recorder._clock.mark()

    def begin_wait(self) -> None:
        self._wait = self._recorder._clock.mark()

    def end(self) -> None:
        recorder = self._recorder
        end = recorder._clock.mark()
        if self._is_nested:
            recorder._domain.pop_range()
        else:
            recorder._domain.end_range(self._range)
        recorder._add((self._row_name, self._begin, self._wait, end, *self._row_end))


class _Writer:
    """The thread that writes, and the queue before it."""

    def __init__(self, path: Path, facts: Mapping[str, Any], clock: Clock) -> None:
        self._path, self._clock = path, clock
        self._queue: queue.Queue[tuple[int, array[int], list[Name], int] | None] = queue.Queue(_MAX_WAITING_BLOCKS)
        self._unsent: list[Name] = []
        self._num_lost, self._num_unwritten = 0, 0
        self._first_line = sealed_line({"columns": COLUMNS, "byteorder": sys.byteorder, **facts})
        self._thread = threading.Thread(target=self._run, name="trace writer", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        return self._num_lost + self._num_unwritten

    def put(self, step: int, rows: array[int], names: list[Name], dropped: int) -> None:
        self._unsent += names
        try:
            self._queue.put_nowait((step, rows, self._unsent, dropped + self._num_lost))
            self._unsent = []
        except queue.Full:
            self._num_lost += len(rows) // _WIDTH
            self._clock.forget(times_of(rows))

    def close(self, step: int, dropped: int) -> None:
        try:
            self._queue.put((step, array("q"), self._unsent, dropped + self._num_lost), timeout=_CLOSE_TIMEOUT_S)
            self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            warn(f"{self._path} is not written to its end: its file system has not answered for {_CLOSE_TIMEOUT_S:g} s")
            return
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        block, is_over = None, False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "wb") as file:
                file.write(self._first_line)
                while (block := self._queue.get()) is not None:
                    file.write(self._encoded(*block))
                    if self._queue.empty():
                        file.flush()
                is_over = True
        except OSError as error:
            warn(f"{self._path} cannot be written: {error}; training goes on, and this rank has no further trace")
            if not is_over:  # else it was the last of it, as the file was closed
                self._discard(block)

    def _encoded(self, step: int, rows: array[int], names: list[Name], dropped: int) -> bytes:
        times = self._clock.resolve(times_of(rows))
        for column in (1, 2, 3):
            rows[column::_WIDTH] = array("q", times[column - 1 :: 3])
        data = rows.tobytes()
        head = {
            "step": step,
            "rows": len(rows) // _WIDTH,
            "crc32": zlib.crc32(data),
            "dropped": dropped,
            "names": [asdict(name) for name in names],
        }
        return sealed_line(head) + data

    def _discard(self, block: tuple[int, array[int], list[Name], int] | None) -> None:
        """Count what was not written, and take what still comes, so that nobody waits for a place in the queue."""
        if block is None:
            block = self._queue.get()
        while block is not None:
            self._num_unwritten += len(block[1]) // _WIDTH
            self._clock.forget(times_of(block[1]))
            block = self._queue.get()

"""The ranks' parts of a checkpoint, written from their memory: a file a rank, several at a time. Needs no torch."""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpc_train.checkpoint.files.write import Flow, write_boxes, write_new_file
from hpc_train.checkpoint.format.placed import PlacedBox, WrittenBox
from hpc_train.checkpoint.stores.location import Location

Log = Callable[[str], None]

_FILES_AT_ONCE = 4
"""Assumed: streams that fill a node's link to a store; more of them only take turns."""


@dataclass(frozen=True)
class Part:
    """What a rank saves: where its boxes lie in its file, and where the bytes of each begin in its shared memory."""

    placed: tuple[PlacedBox, ...]
    offsets: tuple[int, ...]
    memory: mmap.mmap

    @property
    def num_bytes(self) -> int:
        return sum(box.num_bytes for box in self.placed)

    def raw_bytes(self, number: int) -> memoryview:
        start = self.offsets[number]
        return memoryview(self.memory)[start : start + self.placed[number].num_bytes]


def write_parts(folder: Location, parts: Sequence[Part], flow: Flow, log: Log) -> list[WrittenBox]:
    """Write the ranks' files into a folder; the first that fails ends the others."""
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    filled = [part for part in parts if part.placed]
    for number in range(len(filled)):
        numbers.put(number)
    written: dict[int, list[WrittenBox]] = {}
    problems: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                number = numbers.get_nowait()
                part = filled[number]
                written[number] = _write_part(folder, part, flow, log)
        except queue.Empty:
            pass
        except BaseException as problem:  # clients in Rust that panic raise what is no Exception
            problems.append(problem)
            flow.stop(str(problem))

    # Daemons: a file system that hangs must not keep the agent from ending.
    threads = [
        threading.Thread(target=work, name=f"write {number}", daemon=True)
        for number in range(min(_FILES_AT_ONCE, len(filled)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return [box for number in range(len(filled)) for box in written[number]]


def _write_part(folder: Location, part: Part, flow: Flow, log: Log) -> list[WrittenBox]:
    target = folder / part.placed[0].file
    return write_new_file(target, lambda place: write_boxes(place, part.placed, part.raw_bytes, flow), log)

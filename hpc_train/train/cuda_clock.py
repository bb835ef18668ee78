"""Marks in the order of a GPU's stream, by CUDA events: nothing waits for them until a thread asks for their times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from hpc_train.record import Clock


class CudaClock(Clock):
    """Events on the stream that is current where they are marked, on the host's time scale.

    An event's time is known as its distance from an anchor, an event whose host time was read where the stream was
    empty; so times are late by what a record of an event takes to run, some 10 us (assumed). The distance is an fp32 of
    milliseconds: 1 us off at 10 s, which is why there are new anchors.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._free: deque[torch.cuda.Event] = deque()
        self._events: dict[int, torch.cuda.Event] = {}
        self._next = 0
        self._anchor = self._new_anchor()

    def mark(self) -> int:
        try:
            event = self._free.popleft()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record()
        number, self._next = self._next, self._next + 1
        self._events[number] = event
        return number

    def anchor(self) -> None:
        self._anchor = self._new_anchor()

    def resolve(self, marks: Sequence[int]) -> list[int]:
        anchor, host_ns = self._anchor
        anchor.synchronize()
        times = {}
        for mark in set(marks):
            event = self._events.pop(mark)
            event.synchronize()
            times[mark] = host_ns + round(anchor.elapsed_time(event) * 1e6)
            self._free.append(event)
        return [times[mark] for mark in marks]

    def forget(self, marks: Sequence[int]) -> None:
        for mark in set(marks):
            self._free.append(self._events.pop(mark))

    def _new_anchor(self) -> tuple[torch.cuda.Event, int]:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event, time.perf_counter_ns()

"""How far a long piece of work is: a bar on a terminal, else a line now and then. On standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TextIO, final

_BAR_EVERY_S, _LINE_EVERY_S = 0.1, 10.0
"""Assumed: a bar that moves smoothly; few lines in a batch job's log, and none of what is done at once."""
_WIDTH = 24


class Advance(Protocol):
    """What work tells of itself; both may be called with 0."""

    def expect(self, num_bytes: int) -> None:
        """So much more is to be done."""

    def advance(self, num_bytes: int) -> None:
        """So much more is done."""


@final
class Unheard(Advance):
    """For work that nobody watches."""

    def expect(self, num_bytes: int) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        pass


UNHEARD = Unheard()


@final
class Progress(Advance):
    """what: said before the numbers, such as `verify step_0000100`."""

    def __init__(self, what: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._stream, self._clock = what, stream or sys.stderr, clock
        self._is_terminal = self._stream.isatty()
        self._begin = self._told_at = clock()
        self._done = self._whole = 0
        self._drawn = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A bar is wiped: what is said next stands in its place."""
        if self._drawn:
            self._write("\r" + " " * self._drawn + "\r")
            self._drawn = 0

    def expect(self, num_bytes: int) -> None:
        self._whole += num_bytes

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        now = self._clock()
        if now - self._told_at < (_BAR_EVERY_S if self._is_terminal else _LINE_EVERY_S):
            return
        self._told_at = now
        if not self._is_terminal:
            self._write(f"{self._what}: {self._numbers(now)}\n")
            return
        filled = _WIDTH * min(self._done, self._whole) // max(self._whole, 1)
        line = f"{self._what} [{'#' * filled}{'.' * (_WIDTH - filled)}] {self._numbers(now)}"
        self._write("\r" + line.ljust(self._drawn))
        self._drawn = len(line)

    def _numbers(self, now: float) -> str:
        # What a store has lost is written again, so more may be done than was expected.
        share = min(self._done, self._whole) / max(self._whole, 1)
        speed = self._done / max(now - self._begin, 1e-6)
        left_s = (self._whole - self._done) / max(speed, 1e-6)
        return (
            f"{int(100 * share)} % of {self._whole / 2**20:.1f} MiB, {speed / 2**20:.1f} MiB/s, "
            f"{max(left_s, 0):.0f} s left"
        )

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

"""When a run stops before its last step: a signal has come, or the time limit comes near.

1. a signal sets a mark, and nothing else: it may come in the middle of a backward pass or of a file's write
2. at the end of each step all ranks learn whether any of them wants to stop (it rides in the step's all-reduce)
3. the loop then saves and leaves, on all ranks alike
"""

from __future__ import annotations

import ctypes
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, MappingProxyType

_REMEMBERED_STEPS = 20
_FIRST_SAVE_S = 60.0
"""Assumed for a save as long as none was measured, but no more than a tenth of the time that the run has."""
_LEAVING_S = 10.0
"""Assumed: from the end of a save to the end of the process, and Slurm's inaccuracy."""
_SAFETY = 1.5
"""Assumed: steps and saves that take half as long again as those that were measured."""


class StopMark:
    """Whether this rank wants the run to stop, and why.

    end_time: epoch seconds at which the time limit ends the job; only one rank needs to be told it, and None means no
    limit. stop_before_s: how long before that to stop; None: from the measured steps and saves.
    """

    def __init__(
        self,
        signals: Sequence[int] = (),
        *,
        end_time: float | None = None,
        stop_before_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._signals = tuple(dict.fromkeys(signals))
        self._warning_times: dict[str, float] = {}
        self._handlers: dict[int, int | None] = {}
        self._received: int | None = None
        self._out_of_time = False
        self._clock = clock
        self.set_limit(end_time, stop_before_s)

    def set_limit(
        self,
        end_time: float | None,
        stop_before_s: float | None,
        warning_times: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Take note of the time limit, and of how many seconds of warning other ends give."""
        self._end_time = end_time
        self._stop_before_s = stop_before_s
        self._warning_times = dict(warning_times)
        if stop_before_s is not None:
            self._warning_times["launch.stop_before_s"] = stop_before_s
        self._begin = self._clock()
        self._steps_s: deque[float] = deque([0.0], maxlen=_REMEMBERED_STEPS)
        self._longest_save_s: float | None = None

    def install(self) -> None:
        """Take the signals over; from the main thread."""
        for number in self._signals:
            signal.signal(number, self._mark)
            # Whatever blocked them in a parent must not keep them from us.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
            self._handlers[number] = _system_handler(number)

    def _mark(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number

    def replaced(self) -> list[str]:
        """Names of the signals whose handler is no longer ours: a library has taken them (FC-32)."""
        return [
            signal.Signals(number).name
            for number, handler in self._handlers.items()
            if signal.getsignal(number) != self._mark or _system_handler(number) != handler
        ]

    def wanted(self, is_saving: bool = False) -> bool:
        """Whether to stop at the end of the present step.

        is_saving: a save is on its way beside the training, and the last one has to wait for it.
        """
        if self._end_time is not None and self._clock() + self.reserve_s(is_saving) > self._end_time:
            self._out_of_time = True
        return self._received is not None or self._out_of_time

    @property
    def reason(self) -> str | None:
        """Why this rank wants to stop, or None if it does not."""
        if self._received is not None:
            return signal.Signals(self._received).name
        return "the time limit" if self._out_of_time else None

    def reserve_s(self, is_saving: bool = False) -> float:
        """How long before the end the last save begins at the latest; is_saving: as `wanted`."""
        return self._stop_before_s if self._stop_before_s is not None else self._needed_s(2 if is_saving else 1)

    def completed_step(self, seconds: float) -> None:
        self._steps_s.append(seconds)

    def completed_save(self, seconds: float) -> str | None:
        """Take note of a save; returns a warning on warning times that turn out too short, once for each."""
        self._longest_save_s = max(seconds, self._longest_save_s or 0.0)
        step_s = max(self._steps_s)
        too_short = {what: time for what, time in self._warning_times.items() if time < step_s + self._longest_save_s}
        for what in too_short:
            del self._warning_times[what]
        if not too_short:
            return None
        named = " and ".join(f"{what} ({time:g} s)" for what, time in too_short.items())
        return (
            f"{named}: shorter than a step and a save ({step_s:.1f} s and {self._longest_save_s:.1f} s), so a save "
            "may fail then, and the last complete checkpoint stands. Ask for a longer warning, or save regularly "
            "(checkpoint.every)"
        )

    def _needed_s(self, num_saves: int) -> float:
        save_s = self._longest_save_s
        if save_s is None:
            assert self._end_time is not None
            save_s = min(_FIRST_SAVE_S, 0.1 * max(0.0, self._end_time - self._begin))
        return _SAFETY * (max(self._steps_s) + num_saves * save_s) + _LEAVING_S


def describe_reasons(reasons: Sequence[str | None]) -> str:
    """Why a run of these ranks stops: `SIGUSR2 on 8 of 8 ranks`."""
    counts = Counter(reason for reason in reasons if reason is not None)
    parts = [
        reason if reason == "the time limit" else f"{reason} on {count} of {len(reasons)} ranks"
        for reason, count in sorted(counts.items())
    ]
    return " and ".join(parts)


def _system_handler(number: int) -> int | None:
    """The address of the handler that the system would call: libraries replace it behind Python's back."""
    # sigaction(2): the handler is the structure's first member on Linux; 256 bytes are more than it has anywhere.
    action = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None).sigaction(number, None, action) != 0:
        return None
    return int.from_bytes(action.raw[: ctypes.sizeof(ctypes.c_void_p)], "little")

"""Progress: a bar that is drawn over itself on a terminal, lines now and then elsewhere, nothing of short work."""

from __future__ import annotations

import io

from hpc_train.checkpoint.progress import Progress


class _Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def _told(is_terminal: bool, seconds_a_step: float) -> str:
    """What 40 steps of 1 MiB say."""
    now, stream = [0.0], _Stream(is_terminal)
    with Progress("verify x", stream, lambda: now[0]) as progress:
        progress.expect(40 << 20)
        for _ in range(40):
            now[0] += seconds_a_step
            progress.advance(1 << 20)
    return stream.getvalue()


def test_a_log_gets_whole_lines_now_and_then() -> None:
    told = _told(is_terminal=False, seconds_a_step=1.0)
    assert "\r" not in told and told.splitlines() == [
        f"verify x: {25 * quarter} % of 40.0 MiB, 1.0 MiB/s, {40 - 10 * quarter} s left" for quarter in range(1, 5)
    ]


def test_short_work_says_nothing_in_a_log() -> None:
    assert _told(is_terminal=False, seconds_a_step=0.1) == ""


def test_a_terminal_shows_one_line_that_is_gone_at_the_end() -> None:
    told = _told(is_terminal=True, seconds_a_step=1.0)
    assert "\n" not in told
    *_, last, blank, end = told.split("\r")
    assert last.startswith("verify x [########################] 100 % of 40.0 MiB")
    assert blank.strip() == "" and len(blank) >= len(last.rstrip()) and end == ""

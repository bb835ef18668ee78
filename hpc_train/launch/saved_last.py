"""What of a run is in its store, asked when its ranks have ended: the verdict on them neither waits for it nor fails.

A store that fails or hangs is what ends many a run. The driver has to tell of that end all the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hpc_train.launch.run_folder import newest_saved_step, num_stalled, read_attempts

T = TypeVar("T")

_PATIENCE_S = 30.0
"""For an answer; assumed: a folder and the first bytes of each manifest in it take seconds where files are slow."""


class _NotKnownError(Exception):
    """The store does not say, and why."""


def last_saved(run_dir: Path) -> str:
    """What of a run is in its store when an attempt has ended, in words; or that it is not known. Raises nothing."""
    try:
        step, attempts = _within_patience(lambda: (newest_saved_step(run_dir), read_attempts(run_dir)))
    except _NotKnownError as problem:
        return f"what was saved last is not known: {problem}"
    if step is None:
        return "nothing was saved"
    is_new = not attempts or attempts[-1].get("saved_step") != step
    name = f"step_{step:07d}"
    return f"{name} was saved last" if is_new else f"nothing was saved since the start, so {name} is still the newest"


def stalled_starts(run_dir: Path, job_id: str | None, say: Callable[[str], None]) -> int:
    """As `num_stalled`; 0 where it is not known, which is said.

    The start that may follow counts again before it starts ranks.
    """
    try:
        return _within_patience(lambda: num_stalled(run_dir, job_id))
    except _NotKnownError as problem:
        say(f"warning: how many starts of this job saved nothing new is not known: {problem}")
        return 0


def _within_patience(ask: Callable[[], T]) -> T:
    """The answer, from a thread that is left behind where none comes.

    Raises:
        _NotKnownError: there is none, whatever the reason, or a signal ended the wait.
    """
    answers: list[T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, name="saved last", daemon=True)
    try:
        thread.start()
        thread.join(_PATIENCE_S)
    except KeyboardInterrupt as interruption:
        raise _NotKnownError(f"{interruption or 'Ctrl-C'} while the checkpoints' folder was looked at") from None
    if answers:
        return answers[0]
    if problems:
        raise _NotKnownError(str(problems[0]) or type(problems[0]).__name__) from problems[0]
    raise _NotKnownError(f"the checkpoints' folder did not answer for {_PATIENCE_S:g} s")

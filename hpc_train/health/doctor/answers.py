"""Answers of other programs, with a time limit; and small files. Nothing here raises."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NO_ANSWER = "gave no answer"


@dataclass(frozen=True)
class Answer:
    """What a program printed. code is None where it could not be started or gave no answer in time."""

    code: int | None
    out: str
    err: str

    @property
    def is_good(self) -> bool:
        return self.code == 0

    @property
    def text(self) -> str:
        return self.out + self.err


def ask(argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 10.0) -> Answer:
    """Run a program without input and return what it says."""
    try:
        done = subprocess.run(
            list(argv),
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        return Answer(None, "", f"{argv[0]} is not on PATH")
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"{argv[0]} {NO_ANSWER} in {timeout_s:g} s")
    except OSError as problem:
        return Answer(None, "", f"{argv[0]} cannot be started: {problem.strerror}")
    return Answer(done.returncode, done.stdout, done.stderr)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def complaint(answer: Answer) -> str:
    """What a program that was started by srun says is wrong: its own last words, else srun's."""
    own = [line for line in answer.err.splitlines() if not line.startswith("srun:") and "*** STEP" not in line]
    return last_line("\n".join(own)) or last_line(answer.err) or f"exit code {answer.code}, without a word"


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""

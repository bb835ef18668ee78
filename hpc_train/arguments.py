"""What arguments of several commands have in common: what values have to be, and how a run is named.

Only argparse is imported here.
"""

from __future__ import annotations

import argparse
from typing import Literal

A_RUN = "a job id, or a run's name (NAME, or NAME/ID)"
"""What stands for a run folder, in help texts."""
_LONGEST_S = 86400.0
"""assumed: nobody at a terminal means a longer wait; it also keeps out infinity."""


def positive(text: str) -> int:
    """A number of 1 or more."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def natural(text: str) -> int:
    """A number of 0 or more."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def seconds(text: str) -> float:
    """A time to wait, above 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to {_LONGEST_S:.0f}")
    return value


def filled(text: str) -> str:
    """Any text but an empty one, which is mostly a variable of a script that was not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is empty; give a value, or leave the option out")
    return text


def add_run(parser: argparse.ArgumentParser, *, nargs: Literal["?"] | None = None) -> None:
    """RUN, and where it is looked for."""
    parser.add_argument("run", type=filled, metavar="RUN", nargs=nargs, help=f"a run folder, {A_RUN}")
    add_runs_dir(parser)


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """Where job ids and names of runs are looked for."""
    parser.add_argument(
        "--runs-dir", type=filled, default="runs", metavar="DIR", help="where run folders are (default: runs)"
    )

"""Which start of a run writes its checkpoints: the last one that has begun. Needs no torch.

Node agents and ranks of an earlier start may still be writing when the next one begins, as after a SIGKILL of the
driver. They look here before they remove or commit anything.
"""

from __future__ import annotations

import hashlib

from hpc_train.checkpoint.stores.location import Location
from hpc_train.errors import CheckpointError

ATTEMPT_FILE = "attempt"
"""In a folder of checkpoints; without it nobody is kept off."""
RANKS_FILE = "attempt.ranks"
"""Beside it: the start whose ranks write by themselves, so that its node agents are kept off, too."""
ATTEMPT_VALUE = "attempt"
"""In a manifest's values: the start of the run that saved it."""


def attempt_of(job_key: str) -> str:
    """What a start of a run is called here; the key itself is nobody else's to know."""
    return hashlib.sha256(job_key.encode()).hexdigest()[:16]


def begin_attempt(root: Location, attempt: str) -> None:
    """From now on those of other starts leave the folder alone.

    Raises:
        CheckpointError: another start does the same in this moment.
    """
    (root / ATTEMPT_FILE).remove()
    try:
        (root / ATTEMPT_FILE).write_text(attempt + "\n")
    except FileExistsError:
        raise CheckpointError(f"another start of this run has just begun to use {root}") from None


def shut_out_agents(root: Location, attempt: str) -> None:
    """From now on the node agents of a start leave the folder alone, too: its ranks write there by themselves.

    In a file of its own: of `attempt` nothing is taken from a start that begins in this moment.

    Raises:
        CheckpointError: another start has begun since, or the store does not take it.
    """
    require_attempt(root, attempt)
    if (root / ATTEMPT_FILE).is_file():
        (root / RANKS_FILE).remove()
        (root / RANKS_FILE).write_text(attempt + "\n")


def require_attempt(root: Location, attempt: str) -> None:
    """Raises CheckpointError where another start of the run has begun since."""
    found = _read(root / ATTEMPT_FILE)
    if found not in (None, attempt):
        raise CheckpointError(f"another start of the run writes to {root} now, and its checkpoints are left to it")


def require_agents(root: Location, attempt: str) -> None:
    """Raises CheckpointError, too, where the ranks of this start write by themselves since."""
    require_attempt(root, attempt)
    if _read(root / RANKS_FILE) == attempt:
        raise CheckpointError(f"the ranks write to {root} by themselves now, so no node agent does")


def _read(file: Location) -> str | None:
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return None

"""Which start of a run writes its checkpoints: the last one that has begun. Needs no torch.

Node agents of an earlier start may still be writing when the next one begins, as after a SIGKILL of the driver. They
look here before they remove or commit anything.
"""

from __future__ import annotations

import hashlib
import secrets

from hpc_train.checkpoint.stores.location import Location
from hpc_train.errors import CheckpointError

ATTEMPT_FILE = "attempt"
"""In a folder of checkpoints; without it nobody is kept off."""
ATTEMPT_VALUE = "attempt"
"""In a manifest's values: the start of the run that saved it, where a driver has begun that."""


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


def shut_out_agents(root: Location) -> None:
    """From now on the node agents of this start leave the folder alone, too: the ranks write there by themselves.

    Raises:
        CheckpointError: the store does not take it.
    """
    if (root / ATTEMPT_FILE).is_file():
        begin_attempt(root, secrets.token_hex(8))


def require_attempt(root: Location, attempt: str) -> None:
    """Raises CheckpointError where another start of the run has begun since."""
    try:
        found = (root / ATTEMPT_FILE).read_text().strip()
    except FileNotFoundError:
        return
    if found != attempt:
        raise CheckpointError(f"another start of the run writes to {root} now, and its checkpoints are left to it")

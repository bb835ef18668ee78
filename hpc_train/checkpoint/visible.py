"""Whether another rank's new folder is seen here."""

from __future__ import annotations

import time

from hpc_train.checkpoint.location import Location
from hpc_train.errors import CheckpointError


def wait_for_folder(path: Location, patience_s: float = 30.0) -> None:
    """Bear with a network file system that shows another node's new folder late (FC-67).

    Raises:
        CheckpointError: it is still not there.
    """
    deadline = time.monotonic() + patience_s
    while not path.is_folder():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path}, made by rank 0, is not visible here after {patience_s:.0f} s; checkpoints must be on "
                "a file system that all nodes share"
            )
        time.sleep(0.1)

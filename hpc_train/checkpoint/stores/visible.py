"""Whether what another rank has put into a store is seen here."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpc_train.checkpoint.stores.location import Location
from hpc_train.errors import CheckpointError


def wait_for_folder(path: Location, patience_s: float = 30.0) -> None:
    """Bear with a network file system that shows another node's new folder late (FC-67).

    Raises:
        CheckpointError: it is still not there.
    """
    _wait(path, path.is_folder, patience_s)


def wait_for_file(path: Location, patience_s: float = 30.0, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """As `wait_for_folder`, for a file; also raises once nobody wants to know any more."""
    _wait(path, path.is_file, patience_s, is_wanted)


def _wait(
    path: Location, is_there: Callable[[], bool], patience_s: float, is_wanted: Callable[[], bool] = lambda: True
) -> None:
    deadline = time.monotonic() + patience_s
    while not is_there():
        if not is_wanted():
            raise CheckpointError(f"{path} was not visible here yet when those who made it had gone")
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path}, made by rank 0, is not visible here after {patience_s:.0f} s; checkpoints must be on "
                "a file system that all nodes share"
            )
        time.sleep(0.1)

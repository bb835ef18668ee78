"""Take a checkpoint out of a run's way by hand, whatever is in it, and put it back. Needs no torch."""

from __future__ import annotations

from hpc_train.checkpoint.folders.folder import (
    LATEST_FILE,
    name_aside,
    read_committed,
    read_latest,
    set_aside_step,
    step_folder,
    step_number,
    steps_newest_first,
    write_latest,
)
from hpc_train.checkpoint.stores.cause import is_unread
from hpc_train.checkpoint.stores.location import Location
from hpc_train.errors import CheckpointError
from hpc_train.log import warn


def set_aside(path: Location) -> Location:
    """Give a checkpoint a name by which no run takes, counts or removes it; nothing of it is read. The new place.

    Raises:
        CheckpointError: it is not there, or has no checkpoint's name.
    """
    if step_number(path.name) is None:
        raise CheckpointError(f"{path} has no checkpoint's name, such as {step_folder(100)}; give one of a run")
    _require(path)
    aside = name_aside(path)
    path.rename(aside)
    _update_latest(path.parent)
    return aside


def put_back(aside: Location) -> Location:
    """Give what was set aside its checkpoint's name again; the place that it has then.

    Raises:
        CheckpointError: it is not there, was not set aside, or another checkpoint has the name now.
    """
    step = set_aside_step(aside.name)
    if step is None:
        raise CheckpointError(f"{aside} was not set aside; its name would be such as {step_folder(100)}.set-aside")
    _require(aside)
    path = aside.parent / step_folder(step)
    aside.rename(path)
    _update_latest(path.parent)
    return path


def _require(path: Location) -> None:
    if path.entry() is None:
        raise CheckpointError(f"{path} does not exist; `hpc-train ckpt ls` shows what is there")


def _update_latest(root: Location) -> None:
    """Have `latest` name the newest checkpoint that has a manifest; without one there is no such file."""
    for _, path in steps_newest_first(root):
        try:
            read_committed(path)
        except CheckpointError as error:
            if is_unread(error):  # no answer is waited for once more with each of the others
                warn(f"{root / LATEST_FILE} is left as it is: {error}")
                return
            continue
        if read_latest(root) != path.name:
            write_latest(root, path.name)
        return
    (root / LATEST_FILE).remove()

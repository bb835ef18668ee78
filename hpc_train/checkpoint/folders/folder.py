"""Names and life of checkpoint folders: temporary, committed, newest, pruned. One rank acts, the others are told.

A checkpoint is written into `.step_0000100.tmp-<token>` and renamed to `step_0000100` when everything in it is on
disk. `latest` is a file with the name of the newest committed folder and is replaced by a rename, after it.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress

from hpc_train.checkpoint.format.manifest import Manifest, NewerFormatError, read_manifest
from hpc_train.checkpoint.stores.location import Location
from hpc_train.checkpoint.stores.store import StoreError, is_outage
from hpc_train.errors import CheckpointError
from hpc_train.log import say, warn

LATEST_FILE = "latest"
_STEP_FOLDER = re.compile(r"^step_(\d{7,})$")
_TEMPORARY = re.compile(r"^\.(step_\d{7,}|latest|trial|copies)\.tmp-[0-9a-f]+$")


def step_folder(step: int) -> str:
    return f"step_{step:07d}"


def create_temporary(
    root: Location, step: int, token: str | None = None, tell: Callable[[str], None] = say
) -> Location:
    """A new folder to write into; what earlier attempts left half-written is removed first.

    token: hexadecimal digits by which other nodes find it, which may have made it already; None: random ones.
    tell: gets a line for each thing that is removed.
    """
    path = temporary_folder(root, step, token or uuid.uuid4().hex)
    root.make_folder()
    for leftover in root.entries():
        if (match := _TEMPORARY.match(leftover.name)) and leftover.name != path.name:
            tell(f"removing {root / leftover.name}, a save that did not complete")
            with suppress(StoreError, OSError):
                # It loses its name first: whoever still writes there must not commit what is half removed.
                doomed = root / _temporary_name(match[1])
                (root / leftover.name).rename(doomed)
                doomed.remove()
    path.make_folder()
    return path


def temporary_folder(root: Location, step: int, token: str) -> Location:
    """Where a step is written before it is committed."""
    return root / f".{step_folder(step)}.tmp-{token}"


def commit(temporary: Location, root: Location, step: int, tell: Callable[[str], None] = warn) -> Location:
    """Make a fully written folder a checkpoint. Files must be durable; the folder itself is flushed here.

    tell: gets a line for what goes wrong behind the rename, which the checkpoint does not need.
    """
    final = root / step_folder(step)
    temporary.flush()
    if final.entry() is not None:
        # Only a damaged checkpoint of this step can stand here: a good one would have been resumed from.
        set_aside = root / _temporary_name(final.name)
        final.rename(set_aside)
        temporary.rename(final)
        with suppress(StoreError, OSError):
            set_aside.remove()
    else:
        temporary.rename(final)
    try:
        root.flush()
        write_latest(root, final.name)
    except (CheckpointError, OSError) as problem:
        tell(f"{final} is saved, but {root / LATEST_FILE} could not be written: {problem}")
    return final


def write_latest(root: Location, name: str) -> None:
    temporary = root / _temporary_name(LATEST_FILE)
    temporary.write_text(name + "\n")
    temporary.replace(root / LATEST_FILE)
    root.flush()


def read_latest(root: Location) -> str | None:
    """The name in `latest`, or None where there is none that can be read."""
    try:
        return (root / LATEST_FILE).read_text().strip()
    except (FileNotFoundError, StoreError, ValueError):
        return None


def step_number(name: str) -> int | None:
    """The step of a committed checkpoint by its folder's name; None for any other name."""
    match = _STEP_FOLDER.match(name)
    return int(match[1]) if match else None


def steps_newest_first(root: Location) -> Iterator[tuple[int, Location]]:
    """Committed folders by step, highest first, whether they are sound or not."""
    try:
        names = [entry.name for entry in root.entries() if entry.is_folder]
    except FileNotFoundError:
        return
    found = [(step, name) for name in names if (step := step_number(name)) is not None]
    yield from ((step, root / name) for step, name in sorted(found, reverse=True))


def sound_checkpoints(root: Location) -> Iterator[tuple[Location, Manifest]]:
    """Checkpoints whose files are all there in full size, newest first; says which ones it skips and why."""
    for _, path in steps_newest_first(root):
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            if is_outage(error) or isinstance(error, NewerFormatError):
                raise  # the older one would be taken although this one may be whole
            warn(f"checkpoint {path} skipped: {error}")
            continue
        yield path, manifest


def prune(
    root: Location, keep: int, tell: Callable[[str], None] = warn, is_enough: Callable[[], bool] = lambda: False
) -> None:
    """Remove all but the newest `keep` sound checkpoints (0: keep all). Damaged ones do not count and stay.

    What cannot be looked at or removed now is told and left for the next time: the save before it went well.

    is_enough: asked after each one that was removed; true leaves the rest for the next time.
    """
    if keep == 0:
        return
    try:
        kept = 0
        for _, path in steps_newest_first(root):
            if _is_sound(path):
                kept += 1
                if kept > keep:
                    remove_checkpoint(path)
                    if is_enough():
                        return
    except (CheckpointError, OSError) as error:
        tell(f"old checkpoints are left: {error}")


def _is_sound(path: Location) -> bool:
    try:
        read_manifest(path)
    except CheckpointError as error:
        if is_outage(error):
            raise
        return False
    return True


def remove_checkpoint(path: Location) -> None:
    """Remove a checkpoint: at once for every reader, since it loses its name first."""
    doomed = path.parent / _temporary_name(path.name)
    path.rename(doomed)
    with suppress(StoreError, OSError):
        doomed.remove()


def _temporary_name(name: str) -> str:
    return f".{name}.tmp-{uuid.uuid4().hex}"

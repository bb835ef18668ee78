"""Names and life of checkpoint folders: temporary, committed, newest, pruned. One rank acts, the others are told.

A checkpoint is written into `.step_0000100.tmp-<token>` and renamed to `step_0000100` when everything in it is on
disk. `latest` is a file with the name of the newest committed folder and is replaced by a rename, after it.

A folder counts as the checkpoint of the step that its name says only where its manifest says the same. What else has
the name of a step that is saved is kept beside it, as `step_0000100.set-aside`.
"""

from __future__ import annotations

import itertools
import re
import shlex
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress

from hpc_train.checkpoint.folders.attempt import ATTEMPT_VALUE
from hpc_train.checkpoint.folders.damage import damage_found
from hpc_train.checkpoint.format.manifest import Manifest, NewerFormatError, UnfinishedError, read_manifest
from hpc_train.checkpoint.stores.backend import Entry
from hpc_train.checkpoint.stores.cause import StoreError, is_outage, is_unread
from hpc_train.checkpoint.stores.location import Location
from hpc_train.errors import CheckpointError
from hpc_train.log import say, warn

LATEST_FILE = "latest"
NO_FOLDER = "is no folder but a file, or a link that leads nowhere"
"""What has the name of a checkpoint and cannot be one."""
_STEP_FOLDER = re.compile(r"step_(\d{7,})")
_SET_ASIDE = re.compile(r"step_(\d{7,})\.set-aside(-\d+)?")
_LATE_S, _LOOK_S = 0.5, 0.25
"""How long a manifest that is not there is looked for again, and how often; assumed: what a start may wait for each
damaged checkpoint. On HDFS none of 540 was seen late (measured: each read as soon as its folder showed)."""
_TEMPORARY = re.compile(r"^\.(step_\d{7,}|latest|trial|copies)\.tmp-[0-9a-f]+$")


class MisnamedError(CheckpointError):
    """A checkpoint under the name of another step: never taken for that one, counted or removed."""


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
                (root / leftover.name).discard(root / _temporary_name(match[1]))
    path.make_folder()
    return path


def temporary_folder(root: Location, step: int, token: str) -> Location:
    """Where a step is written before it is committed."""
    return root / f".{step_folder(step)}.tmp-{token}"


def commit(
    temporary: Location,
    root: Location,
    step: int,
    tell: Callable[[str], None] = warn,
    check: Callable[[], None] = lambda: None,
) -> Location:
    """Make a fully written folder a checkpoint. Files must be durable; the folder itself is flushed here.

    What has its name already keeps its content under another one, unless this start of the run has saved it. Where the
    new one does not come after all, what was there has its name again.

    tell: gets a line for what was found there, and for what goes wrong behind the rename, which the checkpoint does not
    need. check: may raise, as the last thing before names change; flushing may have taken long.
    """
    final = root / step_folder(step)
    temporary.flush()
    check()
    if final.entry() is None:
        temporary.rename(final)
    else:
        _take_name(temporary, final, tell)
    try:
        root.flush()
        write_latest(root, final.name)
    except (CheckpointError, OSError) as problem:
        tell(f"{final} is saved, but {root / LATEST_FILE} could not be written: {problem}")
    return final


def _take_name(temporary: Location, final: Location, tell: Callable[[str], None]) -> None:
    """Give a checkpoint the name that something else has.

    That is set aside until the new one stands, under a name that no save removes, whatever ends this in between.
    """
    is_twice = _is_of_one_start(final, temporary)
    aside = name_aside(final)
    final.rename(aside)
    try:
        temporary.rename(final)
    except BaseException:
        try:
            aside.rename(final)
        except (StoreError, OSError) as problem:
            tell(f"what was {final} is kept as {aside.name}; it could not be named back: {problem}")
        raise
    if is_twice:
        with suppress(StoreError, OSError):
            aside.discard(final.parent / _temporary_name(final.name))
    else:
        tell(
            f"{final} was there already, and not saved by this start of the run: it is kept as {aside.name}. Look at "
            "it, and remove it by hand"
        )


def name_aside(final: Location) -> Location:
    """A name that is free, for what a checkpoint's name is taken from."""
    taken = {entry.name for entry in final.parent.entries()}
    first = f"{final.name}.set-aside"
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    return final.parent / next(name for name in names if name not in taken)


def _is_of_one_start(final: Location, temporary: Location) -> bool:
    """Whether a start of the run has saved a step twice, as after an agent that ended behind its commit.

    Raises:
        CheckpointError: the temporary one is not whole, so that there is nothing to make way for.
    """
    here = read_manifest(temporary)
    if not final.is_folder():
        return False
    try:
        there = read_committed(final)
    except CheckpointError as error:
        if is_outage(error):
            raise
        return False
    attempt = here.values.get(ATTEMPT_VALUE)
    return attempt is not None and attempt == there.values.get(ATTEMPT_VALUE)


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
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def set_aside_step(name: str) -> int | None:
    """The step under whose name something was found and set aside, by the name that it has now."""
    match = _SET_ASIDE.fullmatch(name)
    return int(match[1]) if match else None


def steps_newest_first(root: Location) -> Iterator[tuple[int, Location]]:
    """Committed folders by step, highest first, whether they are sound or not."""
    yield from ((step, root / entry.name) for step, entry in named_newest_first(root) if entry.is_folder)


def named_newest_first(root: Location) -> Iterator[tuple[int, Entry]]:
    """All that has the name of a checkpoint by its step, highest first: also what is no folder."""
    try:
        entries = root.entries()
    except FileNotFoundError:
        return
    found = [(step, entry) for entry in entries if (step := step_number(entry.name)) is not None]
    yield from sorted(found, key=lambda item: (item[0], item[1].name), reverse=True)


def read_committed(path: Location) -> Manifest:
    """The manifest of a committed folder, as `read_manifest`; of a folder with any other name as well.

    Raises:
        MisnamedError: it is of another step than the folder's name says.
    """
    manifest, named = read_manifest(path), step_number(path.name)
    if named not in (None, manifest.step):
        raise MisnamedError(
            f"{path} holds step {manifest.step}, and not the one of its name: it was copied, linked or renamed by "
            f"hand. Under that name it counts for nothing; name it {step_folder(manifest.step)}, or move it away"
        )
    return manifest


def newest_step(root: Location) -> int | None:
    """The newest step that was committed here, whether it is sound or not; None where there is none.

    Raises:
        StoreError: the newest one cannot be read, so that nobody knows whether it is of that step.
    """
    for step, path in steps_newest_first(root):
        try:
            read_committed(path)
        except MisnamedError:
            continue
        except CheckpointError as error:
            if is_unread(error):
                raise unread_refusal(path, error) from error
        return step
    return None


def sound_checkpoints(
    root: Location, sleep: Callable[[float], None] = time.sleep
) -> Iterator[tuple[Location, Manifest]]:
    """Checkpoints that are what their name says and whose files are all there in full size, newest first.

    Says which ones it skips and why.

    Raises:
        StoreError: one cannot be read, so that an older one would be taken although it may be whole.
        NewerFormatError: for the same reason.
    """
    for _, entry in named_newest_first(root):
        path = root / entry.name
        if not entry.is_folder:
            warn(f"{path} skipped: it {NO_FOLDER}")
            continue
        try:
            manifest = _read_patiently(path, sleep)
        except CheckpointError as error:
            if is_unread(error):
                raise unread_refusal(path, error) from error
            if isinstance(error, NewerFormatError):
                raise
            warn(f"checkpoint {path} skipped: {error}")
            continue
        yield path, manifest


def unread_refusal(path: Location, error: CheckpointError) -> StoreError:
    """Why no older checkpoint is taken for one that a store does not give, and how to take one all the same."""
    told = StoreError(
        f"{path} cannot be read and may be whole, so no older checkpoint is taken in its place (to go on from an older "
        f"one all the same: {set_aside_command(path)}): {error}",
        error.cause if isinstance(error, StoreError) else None,
    )
    told.reporter = error.reporter
    return told


def set_aside_command(path: Location) -> str:
    """What a user types to take a checkpoint out of a run's way."""
    return f"hpc-train ckpt set-aside {shlex.quote(str(path))}"


def _read_patiently(path: Location, sleep: Callable[[float], None]) -> Manifest:
    """As `read_committed`, but looks again where there is no manifest: a store may show a folder before its files."""
    waited_s = 0.0
    while True:
        try:
            manifest = read_committed(path)
        except UnfinishedError:
            if waited_s >= _LATE_S:
                raise
            sleep(_LOOK_S)
            waited_s += _LOOK_S
            continue
        if waited_s:
            warn(f"the manifest of {path} was seen {waited_s:g} s later than the folder: the store shows files late")
        return manifest


def prune(
    root: Location,
    saved: int,
    keep: int,
    tell: Callable[[str], None] = warn,
    check: Callable[[], None] = lambda: None,
    is_enough: Callable[[], bool] = lambda: False,
) -> None:
    """Remove all but the newest `keep` sound checkpoints (0: keep all), behind a save. Damaged and misnamed ones stay,
    uncounted.

    So do those of steps that come after `saved`, the one that was saved now: the run has not gone on from them, since
    bits of theirs had changed, which their files' sizes do not tell. Counted, they would push out all good ones. What
    `latest` names stays too, which is an older one where it could not be written.

    What cannot be read or removed now is told and left for the next time, with all that is older: the save before it
    went well.

    check: may raise, before each one that is removed, which ends it in the same way.
    is_enough: asked after each one that was removed; true leaves the rest for the next time.
    """
    if keep == 0:
        return
    try:
        kept = 0
        for step, path in steps_newest_first(root):
            if step <= saved and _is_sound(path):
                kept += 1
                if kept > keep and path.name != read_latest(root):
                    check()
                    remove_checkpoint(path)
                    if is_enough():
                        return
    except (CheckpointError, OSError) as error:
        tell(f"old checkpoints are left: {error}")


def _is_sound(path: Location) -> bool:
    try:
        read_committed(path)
        return damage_found(path) is None
    except CheckpointError as error:
        if is_unread(error):
            raise
        return False


def remove_checkpoint(path: Location) -> None:
    """Remove a checkpoint: at once for every reader, since it loses its name first."""
    path.discard(path.parent / _temporary_name(path.name))


def _temporary_name(name: str) -> str:
    return f".{name}.tmp-{uuid.uuid4().hex}"

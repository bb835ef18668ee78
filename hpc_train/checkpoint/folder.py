"""Names and life of checkpoint folders: temporary, committed, newest, pruned. One rank acts, the others are told.

A checkpoint is written into `.step_0000100.tmp-<token>` and renamed to `step_0000100` when everything in it is on
disk. `latest` is a file with the name of the newest committed folder and is replaced by a rename, after it.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from hpc_train.checkpoint.manifest import read_manifest
from hpc_train.errors import CheckpointError
from hpc_train.log import say, warn

LATEST_FILE = "latest"
_STEP_FOLDER = re.compile(r"^step_(\d{7,})$")
_TEMPORARY = re.compile(r"^\.step_\d{7,}\.tmp-[0-9a-f]+$")


def step_folder(step: int) -> str:
    return f"step_{step:07d}"


def create_temporary(root: Path, step: int) -> Path:
    """A new folder to write into; what earlier attempts left half-written is removed first."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.iterdir():
        if _TEMPORARY.match(leftover.name):
            say(f"removing {leftover}, a save that did not complete")
            shutil.rmtree(leftover, ignore_errors=True)
    path = root / f".{step_folder(step)}.tmp-{uuid.uuid4().hex}"
    path.mkdir()
    return path


def commit(temporary: Path, root: Path, step: int) -> Path:
    """Make a fully written folder a checkpoint. Files must be flushed; the folder itself is flushed here."""
    final = root / step_folder(step)
    flush_folder(temporary)
    if final.exists():
        # Only a damaged checkpoint of this step can stand here: a good one would have been resumed from.
        set_aside = root / f".{final.name}.tmp-{uuid.uuid4().hex}"
        os.rename(final, set_aside)
        os.rename(temporary, final)
        shutil.rmtree(set_aside, ignore_errors=True)
    else:
        os.rename(temporary, final)
    flush_folder(root)
    write_latest(root, final.name)
    return final


def write_latest(root: Path, name: str) -> None:
    temporary = root / f".{LATEST_FILE}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(name + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, root / LATEST_FILE)
    flush_folder(root)


def steps_newest_first(root: Path) -> Iterator[tuple[int, Path]]:
    """Committed folders by step, highest first, whether they are sound or not."""
    try:
        names = [entry.name for entry in os.scandir(root) if entry.is_dir()]
    except FileNotFoundError:
        return
    found = [(int(match[1]), root / name) for name in names if (match := _STEP_FOLDER.match(name))]
    yield from sorted(found, reverse=True)


def sound_checkpoints(root: Path) -> Iterator[tuple[int, Path]]:
    """Checkpoints whose files are all there in full size, newest first; says which ones it skips and why."""
    for step, path in steps_newest_first(root):
        try:
            read_manifest(path)
        except CheckpointError as error:
            warn(f"checkpoint skipped: {error}")
            continue
        yield step, path


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` sound checkpoints (0: keep all). Damaged ones do not count and stay."""
    if keep == 0:
        return
    for number, (_, path) in enumerate(list(sound_checkpoints(root))):
        if number >= keep:
            doomed = root / f".{path.name}.tmp-{uuid.uuid4().hex}"
            os.rename(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def flush_folder(path: Path) -> None:
    """Make names in a folder durable; file systems that cannot are left alone."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)

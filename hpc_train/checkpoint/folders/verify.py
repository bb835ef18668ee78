"""List checkpoints, and read every stored byte of one against its checksum. Needs no torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from hpc_train.checkpoint.folders.damage import damage_found
from hpc_train.checkpoint.folders.folder import (
    NO_FOLDER,
    read_committed,
    read_latest,
    set_aside_step,
    step_number,
)
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, read_manifest
from hpc_train.checkpoint.format.stored_boxes import StoredBox
from hpc_train.checkpoint.progress import UNHEARD, Advance
from hpc_train.checkpoint.stores.backend import Entry
from hpc_train.checkpoint.stores.cause import is_outage
from hpc_train.checkpoint.stores.location import Location
from hpc_train.checkpoint.stores.store import Reader
from hpc_train.errors import CheckpointError

_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Listed:
    """What has the name of a checkpoint, or had it.

    problem: why it cannot be used or does not count, or None. num_bytes: of the files of its manifest. written_at:
    seconds since 1970, or None where the store does not say.
    """

    path: Location
    step: int
    num_bytes: int
    num_tensors: int
    written_at: float | None
    is_latest: bool
    problem: str | None


def list_checkpoints(root: Location) -> list[Listed]:
    """All that has the name of a committed checkpoint below `root`, oldest first, and what was set aside.

    Sizes are compared, contents are not read; what a start has found in them is told.

    Raises:
        StoreError: the store does not answer.
    """
    latest = read_latest(root)
    listed = []
    for entry in root.entries():
        step, aside = step_number(entry.name), set_aside_step(entry.name)
        if aside is not None:
            listed.append(_unusable(root, entry, aside, "set aside: no run goes on from it or removes it"))
        elif step is not None:
            listed.append(_look_at(root, entry, step, entry.name == latest))
    return sorted(listed, key=lambda item: (item.step, item.path.name))


def verify(folder: Location, progress: Advance = UNHEARD) -> Iterator[str]:
    """Read all boxes of a checkpoint; what is wrong, a sentence each. Nothing: it is sound.

    Raises:
        CheckpointError: there is no manifest that could be compared with, or a file is not as long as it says.
    """
    manifest = read_manifest(folder)
    if not manifest.tensors:
        yield f"the manifest of {folder} names no tensor"
    boxes: dict[str, list[tuple[str, StoredBox]]] = {}
    for name, tensor in manifest.tensors.items():
        held = sum(stored.box.num_elements for stored in tensor.boxes)
        whole = 1
        for extent in tensor.shape:
            whole *= extent
        if held != whole:
            yield f"{name}: its boxes hold {held} elements of {whole}"
        for stored in tensor.boxes:
            boxes.setdefault(stored.file, []).append((name, stored))
    progress.expect(sum(stored.num_bytes for of_file in boxes.values() for _, stored in of_file))
    block = memoryview(bytearray(_BLOCK_BYTES))
    for file, of_file in boxes.items():
        # From front to back: a parallel file system and HDFS read ahead.
        with (folder / file).reading() as reader:
            for name, stored in sorted(of_file, key=lambda item: item[1].start):
                if _checksum(reader, stored, block, progress) != stored.crc32:
                    yield f"{name}: the bytes at {stored.start} of {folder / file} do not have their checksum"


def _look_at(root: Location, entry: Entry, step: int, is_latest: bool) -> Listed:
    if not entry.is_folder:
        return _unusable(root, entry, step, NO_FOLDER, is_latest)
    try:
        manifest, problem = read_committed(root / entry.name), damage_found(root / entry.name)
    except CheckpointError as error:
        if is_outage(error):
            raise
        return _unusable(root, entry, step, str(error), is_latest)
    num_bytes = sum(manifest.files.values())
    changed_at = _changed_at(root, entry)
    return Listed(root / entry.name, step, num_bytes, len(manifest.tensors), changed_at, is_latest, problem)


def _unusable(root: Location, entry: Entry, step: int, problem: str, is_latest: bool = False) -> Listed:
    return Listed(root / entry.name, step, 0, 0, _changed_at(root, entry), is_latest, problem)


def _changed_at(root: Location, entry: Entry) -> float | None:
    """The folder's time; the manifest's where folders have none, as in an object store."""
    if entry.changed_at:
        return entry.changed_at
    manifest = (root / entry.name / MANIFEST_FILE).entry()
    return None if manifest is None else manifest.changed_at or None


def _checksum(reader: Reader, stored: StoredBox, block: memoryview, progress: Advance) -> int:
    crc32, done = 0, 0
    while done < stored.num_bytes:
        wanted = min(stored.num_bytes - done, len(block))
        count = reader.read_into(stored.start + done, block[:wanted])
        crc32, done = zlib.crc32(block[:count], crc32), done + count
        progress.advance(count)
        if count < wanted:
            return -1
    return crc32

"""List checkpoints, and read every stored byte of one against its checksum. Needs no torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from hpc_train.checkpoint.folders.folder import read_latest, step_number
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.format.stored_boxes import StoredBox
from hpc_train.checkpoint.progress import UNHEARD, Advance
from hpc_train.checkpoint.stores.location import Location
from hpc_train.checkpoint.stores.store import Reader, is_outage
from hpc_train.errors import CheckpointError

_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Listed:
    """A checkpoint of a run. problem: why it cannot be used, or None. num_bytes: of the files of its manifest."""

    path: Location
    step: int
    num_bytes: int
    num_tensors: int
    written_at: float
    is_latest: bool
    problem: str | None


def list_checkpoints(root: Location) -> list[Listed]:
    """All committed checkpoints below `root`, oldest first; sizes are compared, contents are not read.

    Raises:
        StoreError: the store does not answer.
    """
    latest = read_latest(root)
    listed = []
    for entry in root.entries():
        step = step_number(entry.name) if entry.is_folder else None
        if step is not None:
            listed.append(_look_at(root / entry.name, step, entry.changed_at, entry.name == latest))
    return sorted(listed, key=lambda item: item.step)


def verify(folder: Location, progress: Advance = UNHEARD) -> Iterator[str]:
    """Read all boxes of a checkpoint; what is wrong, a sentence each. Nothing: it is sound.

    Raises:
        CheckpointError: there is no manifest that could be compared with, or a file is not as long as it says.
    """
    manifest = read_manifest(folder)
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


def _look_at(path: Location, step: int, written_at: float, is_latest: bool) -> Listed:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        if is_outage(error):
            raise
        return Listed(path, step, 0, 0, written_at, is_latest, str(error))
    return Listed(path, step, sum(manifest.files.values()), len(manifest.tensors), written_at, is_latest, problem=None)


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

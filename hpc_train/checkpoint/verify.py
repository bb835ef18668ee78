"""List checkpoints, and read every stored byte of one against its checksum. Needs no torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_train.checkpoint.folder import LATEST_FILE, steps_newest_first
from hpc_train.checkpoint.manifest import StoredBox, read_manifest
from hpc_train.errors import CheckpointError

_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Listed:
    """A checkpoint of a run. problem: why it cannot be used, or None. num_bytes: of the files of its manifest."""

    path: Path
    step: int
    num_bytes: int
    num_tensors: int
    written_at: float
    is_latest: bool
    problem: str | None


def list_checkpoints(root: Path) -> list[Listed]:
    """All committed checkpoints below `root`, oldest first; sizes are compared, contents are not read."""
    try:
        latest = (root / LATEST_FILE).read_text(encoding="utf-8").strip()
    except OSError:
        latest = ""
    return [_look_at(path, step, path.name == latest) for step, path in reversed(list(steps_newest_first(root)))]


def verify(folder: Path) -> Iterator[str]:
    """Read all boxes of a checkpoint; what is wrong, a sentence each. Nothing: it is sound.

    Raises:
        CheckpointError: there is no manifest that could be compared with, or a file is not as long as it says.
    """
    manifest = read_manifest(folder)
    for name, tensor in manifest.tensors.items():
        held = sum(stored.box.num_elements for stored in tensor.boxes)
        whole = 1
        for extent in tensor.shape:
            whole *= extent
        if held != whole:
            yield f"{name}: its boxes hold {held} elements of {whole}"
        for stored in tensor.boxes:
            if _checksum(folder, stored) != stored.crc32:
                yield f"{name}: the bytes at {stored.start} of {folder / stored.file} do not have their checksum"


def _look_at(path: Path, step: int, is_latest: bool) -> Listed:
    written_at = path.stat().st_mtime
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return Listed(path, step, 0, 0, written_at, is_latest, str(error))
    return Listed(path, step, sum(manifest.files.values()), len(manifest.tensors), written_at, is_latest, problem=None)


def _checksum(folder: Path, stored: StoredBox) -> int:
    crc32, left = 0, stored.num_bytes
    with open(folder / stored.file, "rb") as file:
        file.seek(stored.start)
        while left:
            block = file.read(min(left, _BLOCK_BYTES))
            if not block:
                return -1
            crc32, left = zlib.crc32(block, crc32), left - len(block)
    return crc32

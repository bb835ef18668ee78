"""The JSON manifest of a checkpoint: every box, where its raw bytes lie, and their checksum.

The manifest is written last, so a folder without one is not a checkpoint. It is all that our loader reads:
torch's own `.metadata` is a pickle, and is written for other tools only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import CheckpointError
from hpc_train.plan.flat import Box

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor in a file: its raw little-endian bytes at `start`, row-major, and their CRC-32."""

    box: Box
    file: str
    start: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor: type by torch's name (float32), unpadded global shape, and the boxes that make it up."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint. values: step, loader position and other plain state. files: size in bytes by name."""

    step: int
    values: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: dict[str, int]

    def to_json(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, after a check that every file is there in its full size.

    Raises:
        CheckpointError: no manifest, a newer format, a file that is missing or of another size.
    """
    path = folder / MANIFEST_FILE
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        version = tree["format_version"]
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {version}, this hpc_train reads {FORMAT_VERSION}; use a newer hpc_train"
            )
        manifest = _parse(tree)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST_FILE}: it was not written to its end") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    for name, size in manifest.files.items():
        found = _size(folder / name)
        if found != size:
            have = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(f"{folder / name} {have}, the manifest says {size} bytes")
    return manifest


def _parse(tree: dict[str, Any]) -> Manifest:
    tensors = {
        name: StoredTensor(tensor["dtype"], tuple(tensor["shape"]), tuple(_parse_box(box) for box in tensor["boxes"]))
        for name, tensor in tree["tensors"].items()
    }
    return Manifest(int(tree["step"]), tree["values"], tensors, tree["files"])


def _parse_box(tree: dict[str, Any]) -> StoredBox:
    box = Box(tuple(tree["box"]["offsets"]), tuple(tree["box"]["sizes"]))
    return StoredBox(box, tree["file"], tree["start"], tree["num_bytes"], tree["crc32"])


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None

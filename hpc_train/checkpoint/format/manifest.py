"""The JSON manifest of a checkpoint: every box, where its raw bytes lie, and their checksum.

The manifest is written last, so a folder without one is not a checkpoint. It is all that our loader reads:
torch's own `.metadata` is a pickle, and is written for other tools only.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpc_train.checkpoint.format.archive import element_bytes
from hpc_train.checkpoint.format.stored_boxes import StoredBox, StoredBoxes
from hpc_train.checkpoint.stores.backend import LAST_FILE
from hpc_train.checkpoint.stores.location import Location, Place, locate
from hpc_train.errors import CheckpointError
from hpc_train.plan.flat import Box
from hpc_train.plan.json_object import check_kind, parse_object

MANIFEST_FILE = LAST_FILE
FORMAT_VERSION = 2
"""1: an object for each box, and files as an object. 2: the boxes of a tensor in columns, files in a list."""
_CHECKSUM_KEY = ', "checksum": '


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor: type by torch's name (float32), unpadded global shape, and the boxes that make it up."""

    dtype: str
    shape: tuple[int, ...]
    boxes: StoredBoxes


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint. values: step, loader position and other plain state. files: size in bytes by name."""

    step: int
    values: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: dict[str, int]

    def to_json(self) -> str:
        """One JSON object; its last key is the checksum of all the text before."""
        place_of_file = {name: place for place, name in enumerate(self.files)}
        tensors = {
            name: {"dtype": tensor.dtype, "shape": tensor.shape, "boxes": tensor.boxes.to_plain(place_of_file)}
            for name, tensor in self.tensors.items()
        }
        tree = {"step": self.step, "values": self.values, "files": list(self.files.items()), "tensors": tensors}
        return with_checksum(json.dumps({"format_version": FORMAT_VERSION, **tree}, separators=(",", ":")))


class NewerFormatError(CheckpointError):
    """A checkpoint that a newer hpc_train wrote: never skipped for an older one, nor removed."""


class UnfinishedError(CheckpointError):
    """A folder without a manifest."""


def read_manifest(place: Place) -> Manifest:
    """The manifest of a checkpoint folder, after a check that every file is there in its full size.

    Raises:
        CheckpointError: no manifest, a newer format, a file that is missing or of another size.
        StoreError: the store does not answer.
    """
    folder = locate(place)
    path = folder / MANIFEST_FILE
    try:
        manifest = parse_manifest(path.read_text(), folder)
        sizes = {entry.name: entry.num_bytes for entry in folder.entries() if not entry.is_folder}
    except FileNotFoundError:
        raise UnfinishedError(f"{folder} has no {MANIFEST_FILE}: it was not written to its end") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    for name, size in manifest.files.items():
        if sizes.get(name) != size:
            have = f"has {sizes[name]} bytes" if name in sizes else "is missing"
            raise CheckpointError(f"{folder / name} {have}, the manifest says {size} bytes")
    return manifest


def parse_manifest(text: str, folder: Location) -> Manifest:
    """The manifest of `folder` from its text.

    Raises:
        CheckpointError: it is damaged.
        NewerFormatError: it is whole, and of a newer format.
    """
    path = folder / MANIFEST_FILE
    try:
        tree = parse_object(checked_text(text, str(path)), {"format_version": (int,)})
        version = tree["format_version"]
        if version > FORMAT_VERSION:
            raise NewerFormatError(
                f"{path} has format version {version}, this hpc_train reads {FORMAT_VERSION}; use a newer hpc_train"
            )
        for key, kind in {"step": int, "values": dict, "tensors": dict}.items():
            if key not in tree:
                raise ValueError(f"it lacks the key {key!r}")
            check_kind(key, tree[key], (kind,))
        return _parse_version_1(tree) if version == 1 else _parse(tree)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read, so it is damaged or no manifest of ours: {type(error).__name__}: {error}"
        ) from None


def with_checksum(text: str) -> str:
    """A JSON object with the checksum of its text as its last key."""
    head = text[:-1]
    return f"{head}{_CHECKSUM_KEY}{zlib.crc32(head.encode())}}}"


def checked_text(text: str, where: str) -> str:
    """The text, if it is what `with_checksum` gave. Manifests of early versions have no checksum.

    Raises:
        CheckpointError: it is not.
    """
    head, has_checksum, tail = text.rpartition(_CHECKSUM_KEY)
    if has_checksum and int(tail.rstrip().removesuffix("}")) != zlib.crc32(head.encode()):
        raise CheckpointError(f"{where} is damaged: its checksum does not match")
    return text


def _parse(tree: dict[str, Any]) -> Manifest:
    files = _files(tree["files"])
    names = tuple(files)
    tensors = {}
    for name, told in tree["tensors"].items():
        shape, item_bytes = tuple(told["shape"]), element_bytes(told["dtype"])
        boxes = StoredBoxes.from_plain(told["boxes"], len(shape), item_bytes, names)
        tensors[name] = StoredTensor(told["dtype"], shape, boxes)
    return Manifest(tree["step"], tree["values"], tensors, files)


def _files(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Sizes by name; each lies in the checkpoint's own folder."""
    files = dict(pairs)
    for name, num_bytes in files.items():
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"{name!r} is no name of a file in this folder")
        if type(num_bytes) is not int or num_bytes < 0:
            raise ValueError(f"the file {name} cannot have {num_bytes!r} bytes")
    return files


def _parse_version_1(tree: dict[str, Any]) -> Manifest:
    tensors, files = {}, _files(tree["files"].items())
    for name, told in tree["tensors"].items():
        shape, stored = tuple(told["shape"]), [_parse_box(box) for box in told["boxes"]]
        if others := {box.file for box in stored} - files.keys():
            raise ValueError(f"{name} lies in {min(others)!r}, which is none of its files")
        boxes = StoredBoxes.of(stored, len(shape), element_bytes(told["dtype"]))
        tensors[name] = StoredTensor(told["dtype"], shape, boxes)
    return Manifest(tree["step"], tree["values"], tensors, files)


def _parse_box(tree: dict[str, Any]) -> StoredBox:
    box = Box(tuple(tree["box"]["offsets"]), tuple(tree["box"]["sizes"]))
    return StoredBox(box, tree["file"], tree["start"], tree["num_bytes"], tree["crc32"])

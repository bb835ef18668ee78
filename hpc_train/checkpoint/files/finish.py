"""The last files of a checkpoint: torch's index and, behind all others, the manifest. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpc_train.checkpoint.files.write import write_new_file
from hpc_train.checkpoint.format.archive import element_bytes
from hpc_train.checkpoint.format.coverage import coverage_fault
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, Manifest, StoredTensor
from hpc_train.checkpoint.format.placed import WrittenBox
from hpc_train.checkpoint.format.stored_boxes import StoredBoxes
from hpc_train.checkpoint.stores.backend import Buffer
from hpc_train.checkpoint.stores.location import Location
from hpc_train.errors import CheckpointError

METADATA_FILE = ".metadata"
"""torch's own index, a pickle: written for others, never read here."""


def finish(
    folder: Location,
    step: int,
    written: Sequence[WrittenBox],
    values: Mapping[str, Any],
    index: Buffer,
    say: Callable[[str], None],
) -> None:
    """Complete a folder whose files of boxes are there.

    index: the content of torch's index.

    Raises:
        CheckpointError: the boxes do not cover each tensor exactly once, or a file is not there in its full size.
    """
    tensors = tensors_of(written)
    _write(folder / METADATA_FILE, index, say)
    files = {METADATA_FILE: len(index), **laid_out(written)}
    sizes = {entry.name: entry.num_bytes for entry in folder.entries()}
    for name, num_bytes in sorted(files.items()):
        if name not in sizes:
            raise CheckpointError(f"{folder} does not show {name}, which was written there")
        if sizes[name] != num_bytes:
            raise CheckpointError(f"{folder / name} has {sizes[name]} bytes, and {num_bytes} were written there")
    manifest = Manifest(step, dict(values), tensors, dict(sorted(files.items())))
    _write(folder / MANIFEST_FILE, memoryview(manifest.to_json().encode()), say)


def laid_out(written: Sequence[WrittenBox]) -> dict[str, int]:
    """Size of each file of boxes, by its layout."""
    ends: dict[str, int] = {}
    for box in written:
        placed = box.placed
        ends[placed.file] = max(ends.get(placed.file, 0), placed.item_start + placed.item_bytes)
    return ends


def tensors_of(written: Sequence[WrittenBox]) -> dict[str, StoredTensor]:
    """By name the tensors that boxes make up.

    Raises:
        CheckpointError: they do not cover one exactly once.
    """
    boxes: dict[str, list[WrittenBox]] = {}
    for box in written:
        boxes.setdefault(box.placed.name, []).append(box)
    tensors = {}
    for name, of_tensor in boxes.items():
        first, stored = of_tensor[0].placed, tuple(box.stored for box in of_tensor)
        if fault := coverage_fault(first.shape, [box.box for box in stored]):
            raise CheckpointError(f"{name}: {fault}")
        columns = StoredBoxes.of(stored, len(first.shape), element_bytes(first.dtype))
        tensors[name] = StoredTensor(first.dtype, first.shape, columns)
    return tensors


def _write(target: Location, content: Buffer, say: Callable[[str], None]) -> None:
    def write(place: Location) -> None:
        with place.writing() as file:
            file.write(content)

    write_new_file(target, write, say)

"""The last files of a checkpoint: torch's index and, behind all others, the manifest. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpc_train.checkpoint.location import Location
from hpc_train.checkpoint.manifest import MANIFEST_FILE, Manifest, StoredTensor
from hpc_train.checkpoint.placed import WrittenBox
from hpc_train.checkpoint.store import Buffer
from hpc_train.checkpoint.write import write_new_file
from hpc_train.errors import CheckpointError
from hpc_train.plan.flat import Box

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
        CheckpointError: the boxes do not cover each tensor exactly once, or a file is not there.
    """
    tensors = _tensors(written)
    _write(folder / METADATA_FILE, index, say)
    files = {box.placed.file for box in written} | {METADATA_FILE}
    sizes = {entry.name: entry.num_bytes for entry in folder.entries()}
    if missing := sorted(files - set(sizes)):
        raise CheckpointError(f"{folder} does not show {missing[0]}, which was written there")
    manifest = Manifest(step, dict(values), tensors, {name: sizes[name] for name in sorted(files)})
    _write(folder / MANIFEST_FILE, memoryview(manifest.to_json().encode()), say)


def _tensors(written: Sequence[WrittenBox]) -> dict[str, StoredTensor]:
    boxes: dict[str, list[WrittenBox]] = {}
    for box in written:
        boxes.setdefault(box.placed.name, []).append(box)
    tensors = {}
    for name, of_tensor in boxes.items():
        first = of_tensor[0].placed
        covered = sum(box.stored.box.num_elements for box in of_tensor)
        whole = Box((), first.shape).num_elements
        if covered != whole:
            raise CheckpointError(f"{name}: the ranks' pieces hold {covered} elements of {whole}")
        tensors[name] = StoredTensor(first.dtype, first.shape, tuple(box.stored for box in of_tensor))
    return tensors


def _write(target: Location, content: Buffer, say: Callable[[str], None]) -> None:
    def write(place: Location) -> None:
        with place.writing() as file:
            file.write(content)

    write_new_file(target, write, say)

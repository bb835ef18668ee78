"""Read whole tensors of a checkpoint in blocks of rows, whatever mesh wrote its boxes, with checksums on the way."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import torch

from hpc_train.checkpoint.files.boxes import BoxFiles
from hpc_train.checkpoint.format.manifest import StoredTensor
from hpc_train.checkpoint.format.stored_boxes import StoredBox
from hpc_train.checkpoint.stores.location import Location, Place, locate
from hpc_train.errors import CheckpointError
from hpc_train.plan.flat import Box

BLOCK_BYTES = 16 << 20
"""Largest block of rows; a conversion holds a few (assumed: large enough for a parallel file system's stripes)."""


def row_blocks(shape: tuple[int, ...], item_bytes: int, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """First and last + 1 row of blocks of at most `block_bytes`, or of one row. A vector's elements are its rows."""
    row_bytes = item_bytes
    for extent in shape[1:]:
        row_bytes *= extent
    rows = max(1, block_bytes // row_bytes)
    for start in range(0, shape[0], rows):
        yield start, min(shape[0], start + rows)


def read_rows(place: Place, name: str, tensor: StoredTensor) -> Iterator[torch.Tensor]:
    """A tensor's blocks of rows from first to last, in its stored type.

    Blocks span all columns, so what a block and a box share is one run of the box's bytes, and the runs follow each
    other: each box is read once, and its checksum is known when its last run was read.

    Raises:
        CheckpointError: boxes leave a gap or a checksum does not match; the block before is not to be trusted then.
    """
    folder = locate(place)
    dtype = getattr(torch, tensor.dtype)
    boxes = list(tensor.boxes)
    checksums = [0] * len(boxes)
    with BoxFiles(folder) as files:
        for start, stop in row_blocks(tensor.shape, dtype.itemsize):
            wanted = Box((start, *(0 for _ in tensor.shape[1:])), (stop - start, *tensor.shape[1:]))
            block, filled = None, 0
            for index, stored in enumerate(boxes):
                shared = stored.box.intersection(wanted)
                if shared is None:
                    continue
                raw = _read_run(files, stored, shared)
                checksums[index] = zlib.crc32(raw.data, checksums[index])
                if shared.offsets[0] + shared.sizes[0] == stored.box.offsets[0] + stored.box.sizes[0]:
                    _check(folder, name, stored, checksums[index])
                run = torch.from_numpy(raw).view(dtype).view(shared.sizes)
                if shared == wanted:
                    block = run
                else:
                    block = torch.empty(wanted.sizes, dtype=dtype) if block is None else block
                    block[shared.slices_within(wanted)] = run
                filled += shared.num_elements
            if block is None or filled != wanted.num_elements:
                raise CheckpointError(f"{folder}: {name} is stored with gaps: rows {start} to {stop} are not whole")
            del raw, run  # not kept while the caller works
            yield block


def read_whole(place: Place, name: str, tensor: StoredTensor) -> torch.Tensor:
    whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
    row = 0
    for block in read_rows(place, name, tensor):
        whole[row : row + block.shape[0]] = block
        row += block.shape[0]
    return whole


def _read_run(files: BoxFiles, stored: StoredBox, shared: Box) -> np.ndarray:
    row_bytes = stored.num_bytes // stored.box.sizes[0]
    start = stored.start + row_bytes * (shared.offsets[0] - stored.box.offsets[0])
    return files.read(stored.file, start, row_bytes * shared.sizes[0])


def _check(folder: Location, name: str, stored: StoredBox, crc32: int) -> None:
    if crc32 != stored.crc32:
        raise CheckpointError(
            f"{folder / stored.file} is damaged: the checksum of {name}'s bytes at {stored.start} does not match"
        )

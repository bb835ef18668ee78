"""What of a checkpoint's files needs torch: the bytes of tensors.

A rank's file is one torch.save archive a box, one behind the other, as torch's own file writer lays them out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpc_train.checkpoint.files.write import Flow, write_boxes, write_new_file
from hpc_train.checkpoint.format.placed import PlacedBox, WrittenBox, file_of_rank, place_boxes
from hpc_train.checkpoint.format.state import Piece
from hpc_train.checkpoint.progress import Advance
from hpc_train.checkpoint.stores.location import Location
from hpc_train.log import warn


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def place_pieces(pieces: Sequence[Piece], rank: int) -> list[PlacedBox]:
    """Where a rank's pieces lie in its file."""
    return place_boxes(
        file_of_rank(rank), ((piece.name, piece.shape, dtype_name(piece.dtype), piece.box) for piece in pieces)
    )


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements' memory, row-major; a copy only where the tensor is on a device or not contiguous."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_pieces(folder: Location, pieces: Sequence[Piece], rank: int, progress: Advance) -> list[WrittenBox]:
    """Write a rank's pieces into one new file and say where each lies; the file is durable then.

    One piece at a time is copied, if it lies on a device.
    """
    if not pieces:
        return []
    placed = place_pieces(pieces, rank)
    progress.expect(sum(box.num_bytes for box in placed))

    def bytes_of(number: int) -> memoryview:
        data = raw_bytes(pieces[number].tensor())
        progress.advance(len(data))
        return data

    return write_new_file(folder / file_of_rank(rank), lambda place: write_boxes(place, placed, bytes_of, Flow()), warn)

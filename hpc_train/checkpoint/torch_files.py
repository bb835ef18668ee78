"""What of a checkpoint's files needs torch: the bytes of tensors, and torch's own index of them.

A rank's file is one torch.save archive a box, one behind the other, as torch's own file writer lays them out.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hpc_train.checkpoint.location import Location
from hpc_train.checkpoint.placed import PlacedBox, WrittenBox, file_of_rank, place_boxes
from hpc_train.checkpoint.state import Piece
from hpc_train.checkpoint.write import Flow, write_boxes, write_new_file
from hpc_train.log import warn


def import_torch_writer() -> None:
    """Import what torch's index needs: 1.7 s of CPU (measured)."""
    import torch.distributed.checkpoint.filesystem  # noqa: F401


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


def write_pieces(folder: Location, pieces: Sequence[Piece], rank: int) -> list[WrittenBox]:
    """Write a rank's pieces into one new file and say where each lies; the file is durable then.

    One piece at a time is copied, if it lies on a device.
    """
    if not pieces:
        return []
    placed = place_pieces(pieces, rank)
    return write_new_file(
        folder / file_of_rank(rank),
        lambda place: write_boxes(place, placed, lambda number: raw_bytes(pieces[number].tensor()), Flow()),
        warn,
    )


def index_bytes(placed: Sequence[PlacedBox]) -> bytes:
    """The content of torch's index of all ranks' boxes."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    tensors: dict[str, TensorStorageMetadata] = {}
    results = []
    for box in placed:
        properties = TensorProperties(dtype=getattr(torch, box.dtype))
        tensor = tensors.setdefault(box.name, TensorStorageMetadata(properties, torch.Size(box.shape), []))
        offsets = torch.Size(box.offsets)
        index = MetadataIndex(box.name, offsets, len(tensor.chunks))
        tensor.chunks.append(ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
        results.append(WriteResult(index, box.item_bytes, _StorageInfo(box.file, box.item_start, box.item_bytes)))
    content = io.BytesIO()
    writer = _torch_writer(content)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(Metadata(dict(tensors)), [results])
    return content.getvalue()


def _torch_writer(content: io.BytesIO) -> Any:
    """torch's FileSystemWriter, whose one file goes into memory. It syncs nothing: it would sync the whole machine."""
    from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter

    class InMemory(FileSystemBase):
        """What torch's file writer asks of a file system."""

        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            assert mode == "wb", mode
            content.seek(0)
            content.truncate()
            yield content

        def concat_path(self, path: Any, suffix: str) -> Any:
            return suffix

        def init_path(self, path: Any) -> Any:
            return ""

        def rename(self, path: Any, new_path: Any) -> None:
            """Its name is given later."""

        def mkdir(self, path: Any) -> None:
            """There is no folder."""

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
            return True

        def exists(self, path: Any) -> bool:
            return False

        def rm_file(self, path: Any) -> None:
            """There is none."""

    writer: Any = FileSystemWriter("", single_file_per_rank=True, sync_files=False, overwrite=False)
    writer.fs = InMemory()
    return writer

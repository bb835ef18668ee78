"""A checkpoint's files in torch's distributed-checkpoint layout, in any store.

A rank's file is one torch.save archive a box, one behind the other, as torch's own file writer lays them out; that
writer is not used for them, since it keeps a copy of every tensor until its end. Where each tensor's raw bytes lie is
seen as they are written, so nothing is read back.
"""

from __future__ import annotations

import bisect
import io
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import IO, Any, cast

import torch

from hpc_train.checkpoint.location import Location
from hpc_train.checkpoint.manifest import StoredBox
from hpc_train.checkpoint.state import Piece
from hpc_train.checkpoint.store import Writer
from hpc_train.errors import CheckpointError
from hpc_train.plan.flat import Box

METADATA_FILE = ".metadata"
"""torch's own index, a pickle: written for others, never read here."""

_SMALL_BYTES = 4096
"""Headers and directories of torch.save's archives are written in pieces below this (seen: 1 KiB at most)."""


@dataclass(frozen=True)
class Note:
    """A box as it was written: of which tensor, and where its raw bytes and torch's item around them lie.

    Plain values, since ranks tell them to rank 0 as JSON.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    item_start: int
    item_bytes: int
    start: int
    num_bytes: int
    crc32: int

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def stored(self) -> StoredBox:
        box = Box(tuple(self.offsets), tuple(self.sizes))
        return StoredBox(box, self.file, self.start, self.num_bytes, self.crc32)


def import_torch_writer() -> None:
    """Import what writing torch's index needs: 1.7 s of CPU (measured)."""
    import torch.distributed.checkpoint.filesystem  # noqa: F401


def write_pieces(folder: Location, pieces: Sequence[Piece], rank: int) -> list[Note]:
    """Write a rank's pieces into one new file and say where each lies; the file is durable then.

    One piece at a time is copied, if it is a view or lies on a device.
    """
    if not pieces:
        return []
    name, notes = f"__{rank}_0.distcp", []
    with (folder / name).writing() as file:
        stream = _Stream(file)
        for piece in pieces:
            item_start = stream.tell()
            torch.save(_alone(piece.tensor()), cast(IO[bytes], stream))
            item_bytes = stream.tell() - item_start
            start, num_bytes, crc32 = _raw_payload(stream.seen, item_start, item_bytes)
            if num_bytes != piece.box.num_elements * piece.dtype.itemsize:
                raise CheckpointError(
                    f"{piece.name}: {num_bytes} bytes were written for {piece.box.num_elements} elements"
                )
            dtype = str(piece.dtype).removeprefix("torch.")
            place = (name, item_start, item_bytes, start, num_bytes, crc32)
            notes.append(Note(piece.name, piece.shape, dtype, piece.box.offsets, piece.box.sizes, *place))
            stream.seen.clear()
    return notes


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU with a storage of its own: torch.save writes the whole storage."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def write_metadata(folder: Location, notes: Sequence[Note]) -> None:
    """Write torch's index of all ranks' boxes."""
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
    for note in notes:
        properties = TensorProperties(dtype=getattr(torch, note.dtype))
        tensor = tensors.setdefault(note.name, TensorStorageMetadata(properties, torch.Size(note.shape), []))
        offsets = torch.Size(note.offsets)
        index = MetadataIndex(note.name, offsets, len(tensor.chunks))
        tensor.chunks.append(ChunkStorageMetadata(offsets, torch.Size(note.sizes)))
        results.append(WriteResult(index, note.item_bytes, _StorageInfo(note.file, note.item_start, note.item_bytes)))
    writer = _torch_writer(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(Metadata(dict(tensors)), [results])


def _torch_writer(folder: Location) -> Any:
    """torch's FileSystemWriter on a store. It is not asked to sync: where it cannot, it syncs the whole machine."""
    from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter

    class StoreFiles(FileSystemBase):
        """What torch's file writer asks of a file system, by names in one folder."""

        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            assert mode == "wb", mode
            with (folder / str(path)).writing() as file:
                stream = _Stream(file)
                yield stream
                stream.raise_failure()

        def concat_path(self, path: Any, suffix: str) -> Any:
            return suffix

        def init_path(self, path: Any) -> Any:
            return ""

        def rename(self, path: Any, new_path: Any) -> None:
            (folder / str(path)).rename(folder / str(new_path))

        def mkdir(self, path: Any) -> None:
            """The folder is there."""

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
            return True

        def exists(self, path: Any) -> bool:
            return (folder / str(path)).entry() is not None

        def rm_file(self, path: Any) -> None:
            (folder / str(path)).remove()

    writer: Any = FileSystemWriter("", single_file_per_rank=True, sync_files=False, overwrite=False)
    writer.fs = StoreFiles()
    return writer


class _Seen:
    """The small writes of a file, by place: all of a torch.save archive but its tensor."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._parts: list[bytes] = []

    def add(self, start: int, data: memoryview) -> None:
        if len(data) <= _SMALL_BYTES:
            self._starts.append(start)
            self._parts.append(bytes(data))

    def clear(self) -> None:
        self._starts.clear()
        self._parts.clear()

    def read(self, start: int, count: int) -> bytes:
        """Bytes of the file; zeros in the place of what was not kept."""
        found = bytearray(count)
        for index in range(max(0, bisect.bisect_right(self._starts, start) - 1), len(self._starts)):
            at, part = self._starts[index], self._parts[index]
            if at >= start + count:
                break
            first, last = max(start, at), min(start + count, at + len(part))
            if first < last:
                found[first - start : last - start] = part[first - at : last - at]
        return bytes(found)


class _Stream(io.RawIOBase):
    """What torch writes to. It must never fail inside torch's C++ code, so a failure is kept and raised afterwards."""

    def __init__(self, file: Writer) -> None:
        self.seen = _Seen()
        self._file, self._place = file, 0
        self._failure: Exception | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._failure is None:
            try:
                self._file.write(view)
            except Exception as problem:
                self._failure = problem
        self.seen.add(self._place, view)
        self._place += len(view)
        return len(view)

    def tell(self) -> int:
        self.raise_failure()
        return self._place

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """The store's writer is closed by whoever opened it."""


class _Window(io.RawIOBase):
    """Bytes start .. start + length of what was seen, as a file of its own."""

    def __init__(self, seen: _Seen, start: int, length: int) -> None:
        self._seen, self._start, self._length, self._place = seen, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        self._place = base + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._place))
        buffer[:count] = self._seen.read(self._start + self._place, count)
        self._place += count
        return count


def _raw_payload(seen: _Seen, start: int, length: int) -> tuple[int, int, int]:
    """Where the raw bytes of a tensor lie that torch.save wrote at `start`: (start in file, bytes, CRC-32).

    torch.save writes an uncompressed zip archive whose record `data/0` is the tensor's memory.
    """
    with zipfile.ZipFile(_Window(seen, start, length)) as archive:
        record = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
    if record.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError("torch.save compressed a tensor, which this version of hpc_train cannot address")
    header = start + record.header_offset
    lengths = seen.read(header + 26, 4)
    name_length, extra_length = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
    if seen.read(header, 4) != b"PK\x03\x04":
        raise CheckpointError("torch.save wrote its archive in a way that this version of hpc_train does not know")
    return header + 30 + name_length + extra_length, record.file_size, record.CRC

"""Write a checkpoint: torch's distributed-checkpoint files, our manifest, one atomic commit.

1. rank 0 makes a temporary folder
2. every rank writes its pieces by torch's FileSystemWriter and notes where the raw bytes lie
3. rank 0 gathers these notes (as JSON), writes torch's `.metadata` and, last, the manifest
4. rank 0 renames the folder, points `latest` to it and removes old ones

After each phase all ranks agree that it went well; otherwise rank 0 removes the folder and all raise alike.
torch's own dcp.save is not called, since it exchanges pickles between ranks; its file writer is.
"""

from __future__ import annotations

import io
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hpc_train.checkpoint import folder as folders
from hpc_train.checkpoint.manifest import MANIFEST_FILE, Manifest, StoredBox, StoredTensor
from hpc_train.checkpoint.state import Piece, StatePiece
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError, HpcTrainError
from hpc_train.plan.flat import Box


def prepare_saving() -> None:
    """Import now what the first save needs: 1.7 s of CPU (measured), for which the end of a warning may not wait."""
    import torch.distributed.checkpoint.default_planner
    import torch.distributed.checkpoint.filesystem  # noqa: F401


def save_checkpoint(
    root: Path, step: int, pieces: Sequence[StatePiece], values: dict[str, Any], world: World, *, keep: int
) -> Path:
    """Save all ranks' pieces as `root`/step_N and return that path. Collective over all ranks.

    Together the pieces must cover each tensor exactly once. keep: newest checkpoints to keep, 0 for all.

    Raises:
        CheckpointError: on every rank, if any rank could not write; older checkpoints are untouched.
    """
    is_writer = world.rank == 0
    temporary = _agreed_path(world, root, lambda: folders.create_temporary(root, step) if is_writer else None)
    try:
        notes = _agreed(world, root, lambda: _write_pieces(temporary, pieces, world.rank))
        gathered = [note for notes_of_rank in world.control.all_gather(notes) for note in notes_of_rank]
        _agreed(world, root, lambda: _finish(temporary, step, gathered, values) if is_writer else None)
    except HpcTrainError:
        if is_writer:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    final = _agreed_path(world, root, lambda: folders.commit(temporary, root, step) if is_writer else None)
    _agreed(world, root, lambda: folders.prune(root, keep) if is_writer else None)
    return final


def write_alone(folder: Path, step: int, pieces: Sequence[Piece], values: dict[str, Any]) -> None:
    """Write a whole checkpoint from this process into an empty folder, one piece in memory at a time.

    Raises:
        CheckpointError: it could not be written, or the pieces do not cover each tensor exactly once.
    """
    try:
        _finish(folder, step, _write_pieces(folder, pieces, rank=0), values)
    except HpcTrainError:
        raise
    except Exception as problem:
        raise CheckpointError(f"the checkpoint could not be written: {_in_words(problem, folder)}") from problem


def _agreed(world: World, root: Path, phase: Callable[[], Any]) -> Any:
    """Run a phase that may fail on some ranks; return its value, or raise a CheckpointError on all."""
    value, error = None, None
    try:
        value = phase()
    except CheckpointError as problem:
        error = problem
    except Exception as problem:
        error = CheckpointError(f"the checkpoint could not be written: {_in_words(problem, root)}")
        error.__cause__ = problem
    world.agree(error)
    return value


def _in_words(problem: Exception, root: Path) -> str:
    """The problem, and the space left where it may be the cause: torch's writer does not say that a disk is full."""
    text = f"{type(problem).__name__}: {problem}"
    try:
        free = shutil.disk_usage(root).free
    except OSError:
        return text
    return f"{text} ({free / 2**20:.1f} MiB are free at {root})"


def _agreed_path(world: World, root: Path, phase: Callable[[], Path | None]) -> Path:
    """Like _agreed, for a path that rank 0 knows and tells the others."""
    path = _agreed(world, root, phase)
    return Path(world.control.broadcast(str(path)))


def _write_pieces(temporary: Path, pieces: Sequence[Piece], rank: int) -> list[dict[str, Any]]:
    """Write this rank's file and describe each piece in it. Imports torch's checkpoint package (2 s) at first use."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan

    _wait_for_folder(temporary)
    if not pieces:
        return []
    writer = FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True, overwrite=False)
    empty = SavePlan([])
    plan = writer.prepare_global_plan([empty] * rank + [SavePlan(_write_items(pieces))])[rank]
    results = writer.write_data(plan, _planner_for(pieces)).wait()
    by_key = {(piece.name, piece.box.offsets): piece for piece in pieces}
    notes = []
    for result in results:
        stored = result.storage_data
        piece = by_key[result.index.fqn, tuple(result.index.offset or ())]
        start, num_bytes, crc32 = _raw_payload(temporary / stored.relative_path, stored.offset, stored.length)
        if num_bytes != piece.box.num_elements * piece.dtype.itemsize:
            raise CheckpointError(f"{piece.name}: {num_bytes} bytes were written for {piece.box.num_elements} elements")
        notes.append(
            {
                "name": piece.name,
                "shape": piece.shape,
                "dtype": str(piece.dtype).removeprefix("torch."),
                "offsets": piece.box.offsets,
                "sizes": piece.box.sizes,
                "file": stored.relative_path,
                "item": [stored.offset, stored.length],
                "start": start,
                "num_bytes": num_bytes,
                "crc32": crc32,
            }
        )
    return notes


def _wait_for_folder(path: Path, patience_s: float = 30.0) -> None:
    """Bear with a network file system that shows another node's new folder late."""
    deadline = time.monotonic() + patience_s
    while not path.is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path}, made by rank 0, is not visible here after {patience_s:.0f} s; the run folder must be on "
                "a file system that all nodes share"
            )
        time.sleep(0.1)


def _write_items(pieces: Sequence[Piece]) -> list[Any]:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    return [
        WriteItem(
            index=MetadataIndex(piece.name, torch.Size(piece.box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(piece.box.offsets), torch.Size(piece.box.sizes)),
                properties=TensorProperties(dtype=piece.dtype),
                size=torch.Size(piece.shape),
            ),
        )
        for piece in pieces
    ]


def _planner_for(pieces: Sequence[Piece]) -> Any:
    """The part of torch's SavePlanner that its file writer asks: the tensor behind a write item."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    by_key = {(piece.name, piece.box.offsets): piece for piece in pieces}

    class BoxPlanner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> torch.Tensor:
            return by_key[write_item.index.fqn, tuple(write_item.index.offset)].tensor()

    return BoxPlanner()


class _Window(io.RawIOBase):
    """Bytes start .. start + length of an open file, as a file of its own."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._place = file, start, length, 0

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
        self._file.seek(self._start + self._place)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def _raw_payload(path: Path, start: int, length: int) -> tuple[int, int, int]:
    """Where the raw bytes of a tensor lie that torch.save wrote at `start`: (start in file, bytes, CRC-32).

    torch.save writes an uncompressed zip archive whose record `data/0` is the tensor's memory.
    """
    with open(path, "rb") as file, zipfile.ZipFile(_Window(file, start, length)) as archive:
        record = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
        if record.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{path}: torch.save compressed a tensor, which this version cannot address")
        file.seek(start + record.header_offset + 26)
        name_length, extra_length = (int.from_bytes(file.read(2), "little") for _ in range(2))
        payload = start + record.header_offset + 30 + name_length + extra_length
        return payload, record.file_size, record.CRC


def _finish(temporary: Path, step: int, notes: list[dict[str, Any]], values: dict[str, Any]) -> None:
    """On rank 0: check that every tensor is covered once, write torch's metadata, then the manifest."""
    tensors: dict[str, StoredTensor] = {}
    for note in notes:
        known = tensors.get(note["name"]) or StoredTensor(note["dtype"], tuple(note["shape"]), ())
        box = Box(tuple(note["offsets"]), tuple(note["sizes"]))
        stored = StoredBox(box, note["file"], note["start"], note["num_bytes"], note["crc32"])
        tensors[note["name"]] = StoredTensor(known.dtype, known.shape, (*known.boxes, stored))
    for name, tensor in tensors.items():
        covered = sum(stored.box.num_elements for stored in tensor.boxes)
        whole = Box((), tensor.shape).num_elements
        if covered != whole:
            raise CheckpointError(f"{name}: the ranks' pieces hold {covered} elements of {whole}")
    _write_torch_metadata(temporary, notes)
    files = {entry.name: entry.stat().st_size for entry in os.scandir(temporary) if entry.is_file()}
    manifest = Manifest(step, values, tensors, files)
    with open(temporary / MANIFEST_FILE, "w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())


def _write_torch_metadata(temporary: Path, notes: list[dict[str, Any]]) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
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
        properties = TensorProperties(dtype=getattr(torch, note["dtype"]))
        tensor = tensors.setdefault(note["name"], TensorStorageMetadata(properties, torch.Size(note["shape"]), []))
        offsets = torch.Size(note["offsets"])
        index = MetadataIndex(note["name"], offsets, len(tensor.chunks))
        tensor.chunks.append(ChunkStorageMetadata(offsets, torch.Size(note["sizes"])))
        start, length = note["item"]
        results.append(WriteResult(index, length, _StorageInfo(note["file"], start, length)))
    writer = FileSystemWriter(temporary, sync_files=True)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(Metadata(dict(tensors)), [results])

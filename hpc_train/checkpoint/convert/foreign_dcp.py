"""A folder that torch.distributed.checkpoint wrote by itself: its index, without running what a pickle may hold.

torch's own reader unpickles `.metadata` without limits. Here an Unpickler with a list of allowed names reads it, and
tensors come through torch.load with weights_only.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpc_train.checkpoint.files.boxes import BoxFiles
from hpc_train.checkpoint.files.finish import METADATA_FILE
from hpc_train.checkpoint.stores.location import Location
from hpc_train.errors import CheckpointError
from hpc_train.plan.flat import Box

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}


@dataclass(frozen=True)
class ForeignBox:
    """A box of a tensor: which, its global type and shape, and the bytes of a file that torch.save wrote for it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    file: str
    start: int
    num_bytes: int


def is_foreign_dcp(folder: Location) -> bool:
    return (folder / METADATA_FILE).is_file()


def read_index(folder: Location) -> tuple[list[ForeignBox], list[str]]:
    """All boxes of all tensors, and the names of what is no tensor.

    Raises:
        CheckpointError: the index is damaged, or holds what no index of torch holds.
    """
    path = folder / METADATA_FILE
    entry = path.entry()
    raw = bytearray(entry.num_bytes if entry is not None else 0)
    with path.reading() as reader:
        reader.read_into(0, memoryview(raw))
    try:
        metadata = _Index(io.BytesIO(raw), str(path)).load()
        return _boxes(metadata, path)
    except CheckpointError:
        raise
    except Exception as problem:
        raise CheckpointError(f"{path} is no index of torch: {type(problem).__name__}: {problem}") from problem


def read_box(folder: Location, box: ForeignBox) -> torch.Tensor:
    """The elements of a box.

    Raises:
        CheckpointError: the file is damaged, or holds another tensor there than the index says.
    """
    where = f"{folder / box.file} at {box.start}"
    with BoxFiles(folder) as files:
        raw = files.read(box.file, box.start, box.num_bytes)
    try:
        tensor = torch.load(io.BytesIO(raw.tobytes()), map_location="cpu", weights_only=True)
    except Exception as problem:
        raise CheckpointError(f"{where} holds no tensor of {box.name}: {problem}") from problem
    if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tuple(tensor.shape)) != (box.dtype, box.box.sizes):
        found = f"{tensor.dtype}{list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise CheckpointError(f"{where}: {box.name} is {found}, the index says {box.dtype}{list(box.box.sizes)}")
    return tensor.contiguous()


class _Index(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, source: str) -> None:
        super().__init__(file)
        self._source = source

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"{self._source} names {module}.{name}, which is no part of an index of torch. It is not read: a "
            "pickle can run anything"
        )


def _boxes(metadata: Any, path: Location) -> tuple[list[ForeignBox], list[str]]:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    tensors = {name: item for name, item in metadata.state_dict_metadata.items()}
    boxes, found = [], set()
    for index, stored in (metadata.storage_data or {}).items():
        item = tensors[index.fqn]
        if not isinstance(item, TensorStorageMetadata):
            continue
        if getattr(stored, "transform_descriptors", None):
            raise CheckpointError(f"{path}: {index.fqn} is stored by {stored.transform_descriptors}, which is unknown")
        file = str(stored.relative_path)
        if Path(file).name != file:
            raise CheckpointError(f"{path} names the file {file}, which is not in its folder")
        offsets = tuple(index.offset) if index.offset is not None else tuple(0 for _ in item.size)
        chunk = next(chunk for chunk in item.chunks if tuple(chunk.offsets) == offsets)
        box = Box(offsets, tuple(chunk.sizes))
        shape, dtype = tuple(item.size), item.properties.dtype
        boxes.append(ForeignBox(index.fqn, dtype, shape, box, file, int(stored.offset), int(stored.length)))
        found.add(index.fqn)
    return boxes, sorted(set(tensors) - found)

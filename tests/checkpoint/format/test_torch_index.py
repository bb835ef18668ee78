"""The index made without torch is the one that torch makes of the same boxes."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from hpc_train.checkpoint.format.placed import PlacedBox, file_of_rank, place_boxes
from hpc_train.checkpoint.format.torch_index import index_bytes
from hpc_train.plan.flat import Box

DTYPES = ("float32", "bfloat16", "float64", "int64", "bool")


@st.composite
def drawn_boxes(draw: st.DrawFn) -> list[PlacedBox]:
    """Tensors of any types and shapes, cut along their first dimension, on some ranks in any order."""
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6, unique=True))
    boxes = []
    for name in names:
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        rows = shape[0] if shape else 0
        cut = draw(st.integers(0, rows)) if rows else 0
        parts = [(0, rows)] if not 0 < cut < rows else [(0, cut), (cut, rows)]
        for first, stop in parts:
            offsets = (first, *[0] * (len(shape) - 1)) if shape else ()
            boxes.append((name, shape, dtype, Box(offsets, (stop - first, *shape[1:]) if shape else ())))
    boxes = draw(st.permutations(boxes))
    num_ranks = draw(st.integers(1, 3))
    return [box for rank in range(num_ranks) for box in place_boxes(file_of_rank(rank), boxes[rank::num_ranks])]


def made_by_torch(placed: list[PlacedBox], folder: str) -> Metadata:
    """What torch's own writer leaves."""
    tensors: dict[str, TensorStorageMetadata] = {}
    results = []
    for box in placed:
        properties = TensorProperties(dtype=getattr(torch, box.dtype))
        tensor = tensors.setdefault(box.name, TensorStorageMetadata(properties, torch.Size(box.shape), []))
        index = MetadataIndex(box.name, torch.Size(box.offsets), len(tensor.chunks))
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
        info = filesystem._StorageInfo(box.file, box.item_start, box.item_bytes)
        results.append(WriteResult(index, box.item_bytes, info))
    writer = filesystem.FileSystemWriter(folder, sync_files=False)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(Metadata(dict(tensors)), [results])
    return filesystem.FileSystemReader(folder).read_metadata()


def plain(value: Any) -> Any:
    """A value with its attributes, types and order, so that nothing is taken for equal that is not."""
    if isinstance(value, dict):
        return [(plain(key), plain(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [plain(item) for item in value]
    if hasattr(value, "__dict__") and type(value).__module__.startswith("torch.distributed"):
        return type(value), sorted((name, plain(item)) for name, item in vars(value).items() if item is not None)
    return value


@settings(max_examples=30)
@given(placed=drawn_boxes())
def test_it_is_what_torch_writes_of_the_same_boxes(placed: list[PlacedBox], tmp_path_factory: Any) -> None:
    theirs = made_by_torch(placed, str(tmp_path_factory.mktemp("torch")))
    ours = pickle.loads(index_bytes(placed))
    assert type(ours) is Metadata
    assert ours.version == theirs.version and ours.planner_data is None
    for part in ("state_dict_metadata", "storage_data"):
        assert plain(getattr(ours, part)) == plain(getattr(theirs, part))


def test_an_index_of_many_boxes_stays_small_and_names_each_once() -> None:
    """More than the 256 values that a pickle can keep under short numbers."""
    boxes = [
        (f"layers.{number}.weight", (64, 8), "float32", Box((row, 0), (16, 8)))
        for number in range(200)
        for row in range(0, 64, 16)
    ]
    placed = place_boxes(file_of_rank(0), boxes)
    raw = index_bytes(placed)
    found = pickle.loads(raw)
    chunks = Counter({name: len(tensor.chunks) for name, tensor in found.state_dict_metadata.items()})
    assert set(chunks.values()) == {4} and len(chunks) == 200
    assert len(found.storage_data) == len(boxes)
    assert sum(info.length for info in found.storage_data.values()) == sum(box.item_bytes for box in placed)
    assert raw.count(b"layers.7.weight") == 1
    assert len(raw) < 250 * len(boxes)

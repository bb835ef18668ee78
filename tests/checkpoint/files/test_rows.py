"""Whole tensors from the boxes of any mesh."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.checkpoint.files import rows
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.errors import CheckpointError
from hpc_train.plan.flat import Box, boxes_of_range
from tests.checkpoint.convert.hf_folders import SPECS, stored_weights, weights, write_checkpoint


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 5000))
def test_row_blocks_cover_all_rows_once_within_their_size(shape, block_bytes):
    blocks = list(rows.row_blocks(tuple(shape), 4, block_bytes))
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
    assert blocks[-1][1] == shape[0]
    row_bytes = 4 * math.prod(shape[1:])
    assert all((stop - start) * row_bytes <= max(block_bytes, row_bytes) for start, stop in blocks)


def _mesh_boxes(shape: tuple[int, ...], tp: int, dim: int, dp: int) -> list[Box]:
    """A tensor cut over tp ranks in one dimension, and each part as a flat range over dp ranks."""
    dim = min(dim, len(shape) - 1)
    tp = math.gcd(tp, shape[dim])
    sizes = tuple(extent // tp if axis == dim else extent for axis, extent in enumerate(shape))
    total = math.prod(sizes)
    cuts = sorted({total * rank // dp for rank in range(dp + 1)})
    boxes = []
    for part in range(tp):
        moved = tuple(part * sizes[dim] if axis == dim else 0 for axis in range(len(shape)))
        for start, stop in pairwise(cuts):
            for box in boxes_of_range(sizes, start, stop):
                boxes.append(Box(tuple(map(sum, zip(box.offsets, moved, strict=True))), box.sizes))
    return boxes


@pytest.mark.parametrize(("tp", "dim", "dp"), [(1, 0, 3), (2, 0, 1), (4, 1, 1), (2, 1, 3), (4, 0, 5)])
def test_tensors_of_every_mesh_are_read_whole_in_small_blocks(tp, dim, dp, tmp_path, monkeypatch):
    monkeypatch.setattr(rows.row_blocks, "__defaults__", (3 * 16 * 4,))
    tensors = weights(SPECS["llama"])
    boxes = {name: _mesh_boxes(tuple(tensor.shape), tp, dim, dp) for name, tensor in tensors.items()}
    folder = write_checkpoint(tmp_path / "ours", SPECS["llama"], tensors, boxes)
    found = stored_weights(folder)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_damage_is_found_wherever_it_lies(tmp_path):
    tensors = weights(SPECS["gpt-tied"])
    folder = write_checkpoint(tmp_path / "ours", SPECS["gpt-tied"], tensors)
    stored = read_manifest(folder).tensors["model.embedding.weight"]
    (box,) = stored.boxes
    for place in (box.start, box.start + box.num_bytes // 2, box.start + box.num_bytes - 1):
        _flip(folder / box.file, place)
        with pytest.raises(CheckpointError, match=r"damaged: the checksum of model\.embedding\.weight"):
            rows.read_whole(folder, "model.embedding.weight", stored)
        _flip(folder / box.file, place)
    assert torch.equal(rows.read_whole(folder, "model.embedding.weight", stored), tensors["embedding.weight"])


def _flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))

"""The safetensors format, against the safetensors package and with damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpc_train.checkpoint.convert.safetensors_files import (
    INDEX_FILE,
    SINGLE_FILE,
    Entry,
    read_folder,
    read_header,
    require_types,
    split_shards,
    write_folder,
)
from hpc_train.errors import CheckpointError


def _entry(name: str, tensor: torch.Tensor) -> Entry:
    raw = tensor.flatten().view(torch.uint8).numpy()
    # Two blocks, cut within an element.
    return Entry(
        name,
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        lambda: iter([raw[:5].data, raw[5:].data]),
    )


TENSORS = {
    "b.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "a.weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "c": torch.arange(5, dtype=torch.float16),
    "a.bias": torch.arange(7, dtype=torch.float32),
    'odd "näme"': torch.ones(4),
}


def test_the_file_is_the_package_s_to_the_byte(tmp_path):
    from safetensors.torch import save_file

    save_file(TENSORS, tmp_path / "theirs", metadata={"format": "pt"})
    write_folder(tmp_path, [[_entry(name, tensor) for name, tensor in TENSORS.items()]])
    assert (tmp_path / SINGLE_FILE).read_bytes() == (tmp_path / "theirs").read_bytes()


def test_what_the_package_wrote_is_read(tmp_path):
    from safetensors.torch import save_file

    save_file(TENSORS, tmp_path / SINGLE_FILE)
    found = read_folder(tmp_path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        raw = found[name].read(0, found[name].num_bytes)
        assert found[name].shape == tuple(tensor.shape)
        assert torch.equal(torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape), tensor)


def test_shards_stay_below_the_limit_where_they_can(tmp_path):
    entries = [_entry(name, tensor) for name, tensor in TENSORS.items()]
    shards = split_shards(entries, 43)
    assert [[entry.name for entry in shard] for shard in shards] == [
        ["b.weight"], ["a.weight", "c"], ["a.bias"], ['odd "näme"'],
    ]  # fmt: skip
    write_folder(tmp_path, shards)
    assert sorted(path.name for path in tmp_path.glob("model-*")) == [
        f"model-{number:05d}-of-00004.safetensors" for number in (1, 2, 3, 4)
    ]
    assert read_folder(tmp_path).keys() == TENSORS.keys()


def _write(path: Path, header: object, data: bytes = bytes(16)) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _header(**changes: object) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (_header(data_offsets=[0, 20]), "needs 16 bytes, and its place is"),
        (_header(data_offsets=[8, 24]), "damaged or cut short"),
        (_header(data_offsets=[-16, 0]), "in whole numbers of at least 0"),
        (_header(data_offsets=[0.0, 16.0]), "in whole numbers of at least 0"),
        (_header(data_offsets=[0, 16, 16]), "needed are dtype, shape and data_offsets"),
        (_header(shape=[5]), "needs 20 bytes"),
        (_header(shape=None), "its header says of a {'dtype': 'F32', 'shape': None"),
        (_header(shape=[4.0]), "in whole numbers of at least 0"),
        (_header(shape=[-2, -2]), "in whole numbers of at least 0"),
        (_header(dtype=["F32"]), "needed are dtype"),
        ({"a": {"dtype": "F32"}}, "needed are dtype, shape and data_offsets"),
        ({"a": 3}, "its header says of a 3"),
        (_header(shape=[2], data_offsets=[0, 8]), "damaged: 8 bytes lie behind its last tensor, a"),
        ({}, "damaged: 16 bytes lie behind its last tensor, the header"),
        (_header(shape=[2], data_offsets=[8, 16]), "a begins at byte "),
        (_header(shape=[2], data_offsets=[8, 16]), "and leaves a gap behind the header, which ends at "),
        ({**_header(), "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, "and overlaps a, which ends at "),
        ({**_header(), "b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "and overlaps a, which ends at "),
        (_header(dtype="I8", data_offsets=[16, 0]), "damaged or cut short"),
        (b"[" * 200_000 + b"]" * 200_000, "cannot be read: RecursionError"),
        ([1], "cannot be read"),
        (b"{", "cannot be read: JSONDecodeError"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(header, message, tmp_path):
    _write(tmp_path / "x.safetensors", header)
    with pytest.raises(CheckpointError) as refused:
        read_header(tmp_path / "x.safetensors")
    assert message in str(refused.value)


def test_a_type_that_is_not_read_is_refused_only_where_it_is_needed(tmp_path):
    _write(tmp_path / "x.safetensors", {"a": {"dtype": "I8", "shape": [16], "data_offsets": [0, 16]}})
    found = read_header(tmp_path / "x.safetensors")
    assert (found["a"].dtype, found["a"].num_bytes) == ("I8", 16)
    with pytest.raises(CheckpointError, match=r"a is stored as I8\. Read are F32, BF16, F16: no quantised weights"):
        require_types(found)


@pytest.mark.parametrize("data", [b"", b"1234", (1 << 62).to_bytes(8, "little"), (100).to_bytes(8, "little") + b"{}"])
def test_a_file_that_ends_in_its_header_is_refused(data, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="cut short within its header"):
        read_header(tmp_path / "x.safetensors")


def _sharded(folder: Path) -> dict[str, str]:
    write_folder(folder, split_shards([_entry(name, tensor) for name, tensor in TENSORS.items()], 43))
    return json.loads((folder / INDEX_FILE).read_text())["weight_map"]


def _write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    weight_map = _sharded(tmp_path)
    last = "model-00004-of-00004.safetensors"
    for changed, message in [
        ({**weight_map, "z": last}, f"names tensors that are not in their files: z in {last}"),
        ({name: file for name, file in weight_map.items() if name != "c"}, "does not name: c"),
        ({**weight_map, "c": last}, f"not in their files: c in {last}"),
        ({**weight_map, "c": "../c.safetensors"}, "must lie in the same folder"),
        ({**weight_map, "c": "gone.safetensors"}, "names gone.safetensors, which is missing"),
        ([], "cannot be read"),
        ({"c": 3}, "cannot be read"),
    ]:
        _write_index(tmp_path, changed)
        with pytest.raises(CheckpointError) as refused:
            read_folder(tmp_path)
        assert message in str(refused.value)


def test_a_folder_without_safetensors_is_refused_and_its_pickle_named(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"It has pytorch_model.bin, a pickle, which is never read"):
        read_folder(tmp_path)
    _sharded(tmp_path)
    (tmp_path / SINGLE_FILE).write_bytes(b"")
    with pytest.raises(CheckpointError, match="remove the one that is not meant"):
        read_folder(tmp_path)


def test_a_tensor_of_another_length_than_its_shape_is_not_written(tmp_path):
    short = Entry("a", "float32", (4,), lambda: iter([bytes(8)]))
    with pytest.raises(CheckpointError, match="8 bytes came for a, not 16"):
        write_folder(tmp_path, [[short]])

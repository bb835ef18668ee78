"""Archives made without torch are what torch.save would have written, for torch's own reader."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from hpc_train.checkpoint.format.archive import archive_of
from hpc_train.checkpoint.saving.torch_files import raw_bytes
from hpc_train.errors import CheckpointError

_TENSORS = {
    "float32": torch.arange(24, dtype=torch.float32).view(2, 3, 4) / 7,
    "bfloat16": torch.randn(5, 7).bfloat16(),
    "float16": torch.randn(300).half(),
    "float64": torch.tensor(0.1, dtype=torch.float64),
    "int64": torch.arange(-70_000, 70_000, 1000),
    "uint8": torch.zeros(0, 4, dtype=torch.uint8),
    "bool": torch.tensor([[True], [False]]),
}


@pytest.mark.parametrize("dtype", _TENSORS)
def test_torch_loads_an_archive_made_around_the_tensors_memory(dtype: str) -> None:
    tensor = _TENSORS[dtype]
    archive, data = archive_of(dtype, tuple(tensor.shape)), bytes(raw_bytes(tensor))
    whole = archive.head + data + archive.tail(zlib.crc32(data))
    assert archive.num_bytes == tensor.nbytes and archive.total_bytes == len(whole)
    assert len(archive.head) % 64 == 0
    loaded = torch.load(io.BytesIO(whole), weights_only=True)
    assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor)
    with zipfile.ZipFile(io.BytesIO(whole)) as found:
        assert found.testzip() is None
        assert found.read("archive/data/0") == data


@pytest.mark.parametrize("num_elements", [2**30 - 1, 2**30, 2**30 + 17])
def test_a_tensor_of_four_gigabytes_and_more(tmp_path: Path, num_elements: int) -> None:
    """Sizes of 32 bits end in the middle of these; the file has a hole, so it takes no space."""
    archive = archive_of("float32", (num_elements,))
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(archive.head)
        file.seek(archive.num_bytes - 4, 1)
        file.write(b"\0\0\x80?")
        file.write(archive.tail(0))
    assert path.stat().st_size == archive.total_bytes
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded.shape == (num_elements,) and loaded[-1] == 1.0 and loaded[0] == 0.0
    with zipfile.ZipFile(path) as found:
        assert found.getinfo("archive/data/0").file_size == archive.num_bytes


def test_a_type_that_checkpoints_do_not_hold_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no tensors of type complex64, only float64, "):
        archive_of("complex64", (2,))

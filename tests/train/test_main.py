"""What a rank does before it meets the others."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from hpc_train.errors import LaunchError
from hpc_train.train import main


def test_a_run_folder_that_this_node_does_not_see_is_refused_with_its_path(tmp_path: Path, monkeypatch) -> None:
    """FC-67: the run folder lies on the first node's own disk."""
    monkeypatch.setattr(main, "_PATIENCE_S", 0.3)
    with pytest.raises(LaunchError, match=r"plan\.json cannot be read.*all nodes share"):
        main._read(tmp_path / "plan.json")


def test_a_file_that_appears_a_little_later_is_waited_for(tmp_path: Path) -> None:
    """FC-21: a network file system shows another node's file with a delay."""

    def write_later() -> None:
        time.sleep(0.5)
        (tmp_path / "new").write_text("content")
        os.rename(tmp_path / "new", tmp_path / "plan.json")

    writer = threading.Thread(target=write_later)
    writer.start()
    assert main._read(tmp_path / "plan.json") == "content"
    writer.join()


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_that_is_not_there_is_said_with_the_settings_to_lower(error: Exception, is_memory: bool) -> None:
    found = main._out_of_memory(error)
    assert (found is not None) == is_memory
    if found is not None:
        assert "train.micro_batch_size, data.seq_len" in str(found)

"""Who waits for a store sees it get on in all that may take minutes: else a healthy slow one would end a run."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint.folders.folder import create_temporary, prune
from hpc_train.checkpoint.stores import local_store
from hpc_train.checkpoint.stores.location import Location, locate
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone


def _moves_between(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, root: Location, act: Callable[[], object]
) -> int:
    """How many calls of a function found that the store had moved since the one before."""
    real, seen = getattr(module, name), list[float]()

    def slow(*args: Any) -> Any:
        seen.append(root.store.moved_at)
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, slow)
        act()
    return sum(later > sooner for sooner, later in itertools.pairwise(seen))


def test_each_file_of_an_old_checkpoint_and_of_what_was_left_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = locate(tmp_path)
    for step in (1, 2, 3):
        plain_state.save(Alone(), tmp_path, step, 8)
    count = sum(len(list((tmp_path / f"step_000000{step}").iterdir())) for step in (1, 2))
    moves = _moves_between(monkeypatch, local_store.os, "unlink", root, lambda: prune(root, 3, keep=1))
    assert moves == count - 1 >= 5
    leftover = tmp_path / ".step_0000009.tmp-0123"
    leftover.mkdir()
    for number in range(5):
        (leftover / str(number)).touch()
    assert _moves_between(monkeypatch, local_store.os, "unlink", root, lambda: create_temporary(root, 10)) == 4
    assert not leftover.exists()


def test_each_part_of_a_large_file_that_waits_in_memory_for_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_store, "_WRITE_OUT_BYTES", 4096)
    root = locate(tmp_path)
    begun, parts = 1, 11

    def write() -> None:
        with (root / "file").writing() as file:
            file.write(memoryview(bytes(10 * 4096 + 1)))

    assert _moves_between(monkeypatch, local_store, "_write_out", root, write) == begun + parts - 1
    assert (tmp_path / "file").stat().st_size == 10 * 4096 + 1


def test_looking_for_what_is_not_there_moves_nothing(tmp_path: Path) -> None:
    """Who waits for another node's record must be seen to wait."""
    root = locate(tmp_path)
    root.make_folder()
    before = root.store.moved_at
    assert before > 0 and not (root / "record").is_file() and root.entries() == []
    assert root.store.moved_at == before


@pytest.mark.parametrize(("number", "is_told"), [(errno.EIO, True), (errno.ENOSYS, False), (errno.EINVAL, False)])
def test_a_disk_that_fails_is_told_and_a_kernel_without_the_call_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_told: bool
) -> None:
    class Library:
        def __init__(self, name: None, **more: bool) -> None:
            pass

        def sync_file_range(self, *args: object) -> int:
            local_store.ctypes.set_errno(number)
            return -1

    monkeypatch.setattr(local_store.ctypes, "CDLL", Library)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        if is_told:
            with pytest.raises(OSError, match="Input/output error"):
                local_store._write_out(descriptor, 0, 1, 2)
        else:
            assert not local_store._write_out(descriptor, 0, 1, 2)
    finally:
        os.close(descriptor)

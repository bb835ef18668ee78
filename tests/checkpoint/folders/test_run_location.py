"""Checkpoints outside the run folder: found from it, and nobody else's."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpc_train.checkpoint.folders.attempt import ATTEMPT_FILE, attempt_of, require_attempt
from hpc_train.checkpoint.folders.find import checkpoints_folder, find_checkpoint
from hpc_train.checkpoint.folders.run_location import CLAIM_FILE, note_saved, open_location, run_location
from hpc_train.checkpoint.stores import local_store
from hpc_train.checkpoint.stores.location import locate
from hpc_train.errors import CheckpointError
from hpc_train.launch.run_folder import newest_saved_step
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.worlds import single_world

ELEMENTS = 8192


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "llama" / "7"
    folder.mkdir(parents=True)
    return folder


def _open(folder: Path | None, run_dir: Path, num_bytes: int = 1) -> Path:
    root = run_location(str(folder) if folder else None, run_dir)
    open_location(root, run_dir, num_bytes, single_world())
    assert root.local is not None
    return root.local


def test_left_alone_they_are_in_the_run_folder(run_dir: Path) -> None:
    root = _open(None, run_dir)
    assert root == run_dir / "checkpoints" and list(root.iterdir()) == []
    plain_state.save(Alone(), root, 3, ELEMENTS)
    note_saved(locate(root), run_dir, 3)
    assert newest_saved_step(run_dir) == 3
    assert checkpoints_folder(run_dir) == locate(root)


def test_elsewhere_they_are_found_from_the_run_folder(run_dir: Path, tmp_path: Path) -> None:
    root = _open(tmp_path / "scratch", run_dir)
    assert root == tmp_path / "scratch" / "llama" / "7"
    assert newest_saved_step(run_dir) is None
    plain_state.save(Alone(), root, 3, ELEMENTS)
    note_saved(locate(root), run_dir, 3)
    assert newest_saved_step(run_dir) == 3
    assert find_checkpoint(run_dir) == locate(root / "step_0000003")
    (run_dir / "checkpoints" / "elsewhere.json").unlink()
    _open(tmp_path / "scratch", run_dir)  # a driver that lost it is told anew
    assert newest_saved_step(run_dir) == 3


def test_the_folder_of_another_run_is_refused(run_dir: Path, tmp_path: Path) -> None:
    root = _open(tmp_path / "scratch", run_dir)
    other = tmp_path / "other" / "llama" / "7"
    other.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"holds the checkpoints of the run {run_dir}, not of {other}"):
        _open(tmp_path / "scratch", other)
    (root / CLAIM_FILE).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read, so it is not known which run's"):
        _open(tmp_path / "scratch", other)


def test_a_run_does_not_start_anew_because_the_setting_changed(run_dir: Path, tmp_path: Path) -> None:
    root = _open(tmp_path / "scratch", run_dir)
    plain_state.save(Alone(), root, 3, ELEMENTS)
    for folder in (None, tmp_path / "another"):
        with pytest.raises(CheckpointError, match=f"this run's checkpoints are in {root}"):
            _open(folder, run_dir)
    inside = tmp_path / "runs" / "llama" / "8"
    plain_state.save(Alone(), inside / "checkpoints", 3, ELEMENTS)
    with pytest.raises(CheckpointError, match=f"this run's checkpoints are in {inside}/checkpoints"):
        _open(tmp_path / "scratch", inside)


def test_a_run_that_begins_anew_is_refused_among_checkpoints(run_dir: Path) -> None:
    root = run_location(None, run_dir)
    open_location(root, run_dir, 1, single_world(), resume=False)
    assert root.local is not None
    plain_state.save(Alone(), root.local, 3, ELEMENTS)
    with pytest.raises(CheckpointError, match=r"resume=false begins anew, but .* holds step_0000003, of which"):
        open_location(root, run_dir, 1, single_world(), resume=False)
    open_location(root, run_dir, 1, single_world())


def test_a_run_that_has_saved_does_not_start_anew_where_its_folder_is_empty(run_dir: Path, tmp_path: Path) -> None:
    root = _open(tmp_path / "scratch", run_dir)
    _open(tmp_path / "scratch", run_dir)  # nothing was saved yet
    plain_state.save(Alone(), root, 33, ELEMENTS)
    note_saved(locate(root), run_dir, 33)
    (tmp_path / "scratch").rename(tmp_path / "unmounted")
    told = rf"has saved step 33, as {run_dir}/checkpoints/elsewhere\.json says, but {root} holds no .*resume=false"
    with pytest.raises(CheckpointError, match=told):
        _open(tmp_path / "scratch", run_dir)
    assert newest_saved_step(run_dir) == 33 and not root.exists()
    open_location(locate(root), run_dir, 1, single_world(), resume=False)
    _open(tmp_path / "scratch", run_dir)
    inside = tmp_path / "runs" / "llama" / "8"
    inside.mkdir()
    (inside / "attempts.jsonl").write_text('{"saved_step": null}\n{"saved_step": 20}\n{"saved_step": null}\n')
    with pytest.raises(CheckpointError, match=rf"has saved step 20, as {inside}/attempts\.jsonl says"):
        _open(None, inside)
    assert not (inside / "checkpoints").exists()


def test_of_several_starts_the_last_one_has_the_folder(run_dir: Path) -> None:
    root = run_location(None, run_dir)
    require_attempt(root, attempt_of("not opened by anybody"))
    for key in ("7.0.123.abc", "7.1.456.def"):
        open_location(root, run_dir, 1, single_world(), attempt_of(key))
        require_attempt(root, attempt_of(key))
    with pytest.raises(CheckpointError, match="another start of the run writes to"):
        require_attempt(root, attempt_of("7.0.123.abc"))
    assert "abc" not in (run_dir / "checkpoints" / ATTEMPT_FILE).read_text(), "a key is a secret"


def test_lack_of_space_is_known_before_the_first_step(run_dir: Path) -> None:
    with pytest.raises(CheckpointError, match=r"one checkpoint needs 8192.00 GiB, but .* GiB free"):
        _open(None, run_dir, 1 << 43)


def test_where_older_checkpoints_fill_the_disk_the_command_that_thins_them_out_is_told(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = run_dir.parent / "store" / "llama" / "7"
    for step in (2, 4):
        (store / f"step_000000{step}").mkdir(parents=True)
    monkeypatch.setattr(local_store.LocalBackend, "free_bytes", lambda backend, path: 5 << 19)
    # Of the store itself: a run folder that is new knows of none yet.
    told = rf"one checkpoint needs 10\.0 MiB, but .* has 2\.5 MiB free\. 2 .*`hpc-train ckpt prune {store} --keep 1`"
    with pytest.raises(CheckpointError, match=told):
        _open(run_dir.parent / "store", run_dir, 10 << 20)


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_known_before_the_first_step(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(local_store.os, "fsync", fail)
    with pytest.raises(CheckpointError, match=f"checkpoints cannot be written to .*{os.strerror(number)}"):
        _open(None, run_dir)
    assert list((run_dir / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("/proc/x", "no folder can be made there"),
        ("file", "a file stands where a folder is needed"),
        ("file/x", "a file stands where a folder is needed"),
        ("nowhere", "no folder can be made there"),  # a link to nothing
        ("loop", "its links lead in a circle"),
        ("x" * 300, "the name is too long for this file system"),
        ("taken", "a file stands where a folder is needed"),
    ],
)
def test_a_folder_that_cannot_be_made_is_told_in_words(run_dir: Path, tmp_path: Path, folder: str, why: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "nowhere").symlink_to("/proc/nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "taken" / "llama").mkdir(parents=True)
    (tmp_path / "taken" / "llama" / "7").write_text("x")
    with pytest.raises(CheckpointError, match=rf"{why}\. [A-Z].*\["):
        _open(tmp_path / folder, run_dir)

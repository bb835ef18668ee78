"""Old checkpoints go; the last good one, damaged ones and those of a newer version never do."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from hpc_train.checkpoint.folders.damage import DAMAGED_FILE
from hpc_train.checkpoint.folders.find import find_checkpoint
from hpc_train.checkpoint.folders.folder import newest_step, prune, sound_checkpoints
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, NewerFormatError, read_manifest
from hpc_train.checkpoint.loading.load import load_newest
from hpc_train.checkpoint.stores.backend import BackendWriter
from hpc_train.checkpoint.stores.local_store import LocalBackend
from hpc_train.checkpoint.stores.location import locate
from hpc_train.cli import main
from hpc_train.errors import CheckpointError, ExitCode
from hpc_train.launch.run_folder import newest_saved_step
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.worlds import single_world

ELEMENTS = 8192


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run" / "checkpoints"
    for step in range(1, 7):
        plain_state.save(Alone(), root, step, ELEMENTS)
    return tmp_path / "run"


def _steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))


def _flip(run: Path, step: int) -> None:
    path = run / "checkpoints" / f"step_{step:07d}" / "__0_0.distcp"
    box = read_manifest(path.parent).tensors["model.first"].boxes[0]
    data = bytearray(path.read_bytes())
    data[box.start + 5] ^= 1
    path.write_bytes(data)


def test_the_newest_stay(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "prune", str(run), "--keep", "2", "--dry-run"]) == 0
    assert "to go    step_0000004" in capsys.readouterr().out
    assert _steps(run) == [1, 2, 3, 4, 5, 6]
    assert main(["ckpt", "prune", str(run), "--keep", "2", "--every", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [Path(path).name[-1] for path in told["kept"]] == ["6", "5", "3"]
    assert _steps(run) == [3, 5, 6]
    assert [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_the_last_good_one_stays_though_newer_ones_look_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FC-62: bits that rotted do not show in sizes."""
    for step in (6, 5, 4):
        _flip(run, step)
    assert main(["ckpt", "prune", str(run), "--keep", "1"]) == 0
    told = capsys.readouterr().out
    assert "kept     step_0000003" in told and "left     step_0000006, which cannot be used" in told
    assert _steps(run) == [3, 4, 5, 6]
    assert plain_state.load(Alone(), run / "checkpoints", ELEMENTS) == 3


@pytest.mark.parametrize("is_marked", [True, False])
def test_what_a_save_leaves_are_good_ones_though_newer_ones_look_whole(run: Path, is_marked: bool) -> None:
    """FC-62: of a run that goes on from step 4 with a smaller checkpoint.keep, and has not come to step 6 again."""
    root = run / "checkpoints"
    _flip(run, 6)
    shutil.rmtree(root / "step_0000005")
    assert plain_state.load(Alone(), root, ELEMENTS) == 4
    if not is_marked:  # the store was full
        (root / "step_0000006" / DAMAGED_FILE).unlink()
    plain_state.save(Alone(), root, 5, ELEMENTS, keep=1)
    assert _steps(run) == [5, 6] and (root / "latest").read_text() == "step_0000005\n"
    assert plain_state.load(Alone(), root, ELEMENTS) == 5


def test_what_a_start_has_found_damaged_is_neither_counted_nor_removed_until_one_finds_it_good(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later start may find it good: the memory of the node that read it may have been what was damaged."""
    root = run / "checkpoints"
    _flip(run, 6)
    for _ in range(2):
        assert plain_state.load(Alone(), root, ELEMENTS) == 5
    for step in (7, 8):
        plain_state.save(Alone(), root, step, ELEMENTS, keep=2)
    assert _steps(run) == [6, 7, 8]
    assert main(["ckpt", "prune", str(run), "--keep", "1"]) == 0
    why = f"a start has found {root}/step_0000006 damaged: {root}/step_0000006/__0_0.distcp is damaged: the checksum"
    assert f"left     step_0000006, which cannot be used: {why}" in capsys.readouterr().out
    assert _steps(run) == [6, 8]
    assert main(["ckpt", "ls", str(run)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step_0000006  20") and why in first and second.endswith("tensors  (latest)")
    shutil.rmtree(root / "step_0000008")
    _flip(run, 6)
    assert plain_state.load(Alone(), root, ELEMENTS) == 6
    plain_state.save(Alone(), root, 7, ELEMENTS, keep=1)
    assert _steps(run) == [7]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_manifest_that_was_cut_short_needs_no_note_to_count_for_nothing(
    run: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    """As `DAMAGED_FILE` has it for bits that have changed: everybody who looks finds it."""
    root = run / "checkpoints"
    manifest = root / "step_0000006" / MANIFEST_FILE
    os.truncate(manifest, int(manifest.stat().st_size * share))
    assert plain_state.load(Alone(), root, ELEMENTS) == 5
    for step in (7, 8):
        plain_state.save(Alone(), root, step, ELEMENTS, keep=2)
    assert _steps(run) == [6, 7, 8]
    assert main(["ckpt", "prune", str(run), "--keep", "1"]) == 0
    assert "left     step_0000006, which cannot be used: " in capsys.readouterr().out and _steps(run) == [6, 8]
    assert main(["ckpt", "ls", str(run)]) == 0
    assert "is damaged" in capsys.readouterr().out.splitlines()[0]
    assert main(["ckpt", "verify", str(root / "step_0000006")]) == ExitCode.CHECKPOINT


def test_damage_that_cannot_be_noted_is_told(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _flip(run, 6)
    create = LocalBackend.create

    def refuse(backend: LocalBackend, path: str) -> BackendWriter:
        if path.endswith(DAMAGED_FILE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(backend, path)

    monkeypatch.setattr(LocalBackend, "create", refuse)
    assert plain_state.load(Alone(), run / "checkpoints", ELEMENTS) == 5
    assert "step_0000006/damaged could not be written, by which checkpoint.keep goes: " in capsys.readouterr().err


def test_what_latest_names_is_not_removed(run: Path) -> None:
    """FC-62: `latest` could not be written behind the last saves."""
    (run / "checkpoints" / "latest").write_text("step_0000003\n")
    prune(locate(run / "checkpoints"), 6, keep=1)
    assert _steps(run) == [3, 6]


def test_without_a_good_one_nothing_goes(run: Path) -> None:
    for step in range(1, 7):
        _flip(run, step)
    assert main(["ckpt", "prune", str(run), "--keep", "1"]) == 0
    assert _steps(run) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("words", [["--keep", "0"], ["--keep", "x"], [], ["--keep", "1", "--every", "0"]])
def test_a_number_to_keep_is_needed(run: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["ckpt", "prune", str(run), *words])
    assert end.value.code == 2 and len(_steps(run)) == 6


def test_removing_ends_early_where_that_is_asked_for(run: Path) -> None:
    """One has gone, so that a run which is always asked for this keeps no more and more of them."""
    asked: list[list[int]] = []
    prune(locate(run / "checkpoints"), 6, keep=2, is_enough=lambda: not asked.append(_steps(run)))
    assert asked == [[1, 2, 3, 5, 6]] and _steps(run) == [1, 2, 3, 5, 6]
    prune(locate(run / "checkpoints"), 6, keep=2)
    assert _steps(run) == [5, 6]


def test_a_copy_under_another_step_s_name_is_never_taken_counted_or_removed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run / "checkpoints"
    shutil.copytree(root / "step_0000006", root / "step_0000100")
    (root / "step_0000010").symlink_to("step_0000004")
    assert plain_state.load(Alone(), root, ELEMENTS) == 6
    said = capsys.readouterr().err
    assert "step_0000100 skipped: " in said and "holds step 6, and not the one of its name" in said
    assert newest_saved_step(run) == newest_step(locate(root)) == 6
    assert find_checkpoint(run) == locate(root / "step_0000006")
    prune(locate(root), 6, keep=5)
    assert _steps(run) == [2, 3, 4, 5, 6, 10, 100]
    assert main(["ckpt", "prune", str(run), "--keep", "2"]) == 0
    assert "left     step_0000100, which cannot be used" in capsys.readouterr().out
    assert _steps(run) == [5, 6, 10, 100]
    for step in (5, 6):
        shutil.rmtree(root / f"step_{step:07d}")
    with pytest.raises(CheckpointError, match="but none that is whole"):
        find_checkpoint(run)
    assert find_checkpoint(root / "step_0000100") == locate(root / "step_0000100"), "it was named"


def test_a_manifest_that_a_store_shows_later_than_its_folder_is_looked_for_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run / "checkpoints"
    (root / "step_0000006" / MANIFEST_FILE).rename(root / "late")
    (root / "step_0000005" / MANIFEST_FILE).unlink()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            (root / "late").rename(root / "step_0000006" / MANIFEST_FILE)

    found = [manifest.step for _, manifest in sound_checkpoints(locate(root), sleep)]
    assert found == [6, 4, 3, 2, 1] and slept == [0.25] * 4
    said = capsys.readouterr().err
    assert "step_0000006 was seen 0.5 s later than the folder" in said and "step_0000005 skipped" in said


def _make_newer(run: Path, step: int) -> None:
    path = run / "checkpoints" / f"step_{step:07d}" / MANIFEST_FILE
    tree = json.loads(path.read_text())
    del tree["checksum"]
    path.write_text(json.dumps({**tree, "format_version": 3}))


def test_a_newer_version_is_refused_and_never_removed_nor_skipped(run: Path) -> None:
    _make_newer(run, 6)
    _make_newer(run, 2)
    root = run / "checkpoints"
    with pytest.raises(NewerFormatError, match="format version 3, this hpc_train reads 2; use a newer hpc_train"):
        load_newest(root, plain_state.state(Alone(), None, ELEMENTS), single_world())
    assert main(["ckpt", "prune", str(run), "--keep", "1"]) == 0
    assert _steps(run) == [2, 5, 6]
    prune(locate(root), 6, keep=1)
    assert _steps(run) == [2, 5, 6]


def test_a_manifest_without_a_checksum_of_its_own_is_read_and_a_wrong_one_is_not(run: Path) -> None:
    """The first manifests had none."""
    path = run / "checkpoints" / "step_0000006" / MANIFEST_FILE
    text = path.read_text()
    tree = json.loads(text)
    del tree["checksum"]
    path.write_text(json.dumps(tree))
    assert plain_state.load(Alone(), run / "checkpoints", ELEMENTS) == 6
    path.write_text(text.replace('"num_updates":6', '"num_updates":7'))
    with pytest.raises(CheckpointError, match="is damaged: its checksum does not match"):
        read_manifest(path.parent)
    assert plain_state.load(Alone(), run / "checkpoints", ELEMENTS) == 5

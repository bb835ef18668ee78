"""A checkpoint that is committed is never lost to one that does not come."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from hpc_train.checkpoint.folders.attempt import ATTEMPT_VALUE
from hpc_train.checkpoint.folders.folder import commit, create_temporary, steps_newest_first
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, Manifest, UnfinishedError
from hpc_train.checkpoint.stores.cause import StoreError
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.errors import CheckpointError


def _written(root: Location, text: str, attempt: str = "a") -> Location:
    temporary = create_temporary(root, 7)
    (temporary / "file").write_text(text)
    manifest = Manifest(7, {ATTEMPT_VALUE: attempt}, {}, {"file": len(text)})
    (temporary / MANIFEST_FILE).write_text(manifest.to_json())
    return temporary


def _stands(root: Path, text: str) -> None:
    assert [step for step, _ in steps_newest_first(locate(root))] == [7]
    assert (root / "step_0000007/file").read_text() == text


@pytest.mark.parametrize("attempt", ["a", "b"])
def test_a_commit_whose_rename_fails_leaves_what_had_the_name_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: str
) -> None:
    """Saved twice by one start, or by two."""
    root, real = locate(tmp_path), Location.rename
    commit(_written(root, "first"), root, 7)
    again = _written(root, "second", attempt)

    def rename(place: Location, target: Location) -> None:
        if place == again and target.name == "step_0000007":
            create_temporary(root, 8)  # the next save begins, if the process has died
            raise StoreError("the file server does not answer")
        real(place, target)

    monkeypatch.setattr(Location, "rename", rename)
    with pytest.raises(StoreError, match="does not answer"):
        commit(again, root, 7)
    _stands(tmp_path, "first")


def test_where_it_cannot_be_named_back_it_is_kept_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, real, said = locate(tmp_path), Location.rename, list[str]()
    commit(_written(root, "first"), root, 7)
    again = _written(root, "second")

    def rename(place: Location, target: Location) -> None:
        if target.name == "step_0000007":
            raise OSError(errno.EIO, "Input/output error")
        real(place, target)

    monkeypatch.setattr(Location, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        commit(again, root, 7, said.append)
    create_temporary(root, 8)
    assert (tmp_path / "step_0000007.set-aside/file").read_text() == "first"
    assert any("is kept as step_0000007.set-aside" in line for line in said)


def test_a_save_that_has_lost_its_folder_meanwhile_moves_nothing_away(tmp_path: Path) -> None:
    """Its process was stopped or hung for long; others have removed what it wrote, and committed the step."""
    root = locate(tmp_path)
    late = _written(root, "late")
    shutil.rmtree(tmp_path / late.name)
    commit(_written(root, "first", "b"), root, 7)
    late.make_folder()  # so that it can be flushed
    with pytest.raises(UnfinishedError):
        commit(late, root, 7)
    _stands(tmp_path, "first")


def test_the_last_look_at_whether_it_may_commit_is_behind_the_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, flushed = locate(tmp_path), list[Location]()
    late = _written(root, "late")
    monkeypatch.setattr(Location, "flush", lambda place: flushed.append(place))

    def check() -> None:
        assert flushed == [late]
        raise CheckpointError("another start of the run writes here now")

    with pytest.raises(CheckpointError, match="another start"):
        commit(late, root, 7, check=check)
    assert list(steps_newest_first(root)) == []

"""What a store does not give is neither damaged nor passed over: nobody knows what it is."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_train.checkpoint.folders.folder import newest_step, prune, read_latest
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE
from hpc_train.checkpoint.stores.backend import BackendReader
from hpc_train.checkpoint.stores.cause import StoreError, is_outage, is_unread
from hpc_train.checkpoint.stores.hdfs_causes import hdfs_cause
from hpc_train.checkpoint.stores.local_store import LocalBackend
from hpc_train.checkpoint.stores.location import Location
from hpc_train.checkpoint.stores.store import Patience, Store
from hpc_train.cli import main
from hpc_train.errors import ExitCode
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone

ELEMENTS = 8192
Refuse = Callable[[str, int], None]


@pytest.fixture
def root(tmp_path: Path) -> Location:
    """Checkpoints 2, 4 and 6 in a store that is asked once."""
    place = Location(Store("", LocalBackend, Patience(total_s=0.0)), str(tmp_path / "checkpoints"))
    for step in (2, 4, 6):
        plain_state.save(Alone(), place, step, ELEMENTS)
    return place


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Have the file system refuse to open files whose path ends so, as it does for root as well."""

    def refuse(ending: str, number: int) -> None:
        usual = LocalBackend.open_read

        def open_read(backend: LocalBackend, path: str) -> BackendReader:
            if path.endswith(ending):
                raise OSError(number, os.strerror(number))
            return usual(backend, path)

        monkeypatch.setattr(LocalBackend, "open_read", open_read)

    return refuse


def _names(root: Location) -> list[str]:
    return [entry.name for entry in root.entries() if entry.name != "latest"]


ALL = ["step_0000002", "step_0000004", "step_0000006"]


@pytest.mark.parametrize("file", [MANIFEST_FILE, "__0_0.distcp"])
@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.EACCES, "no permission. Have its owner or mode changed"),
        (errno.EPERM, "no permission. Have its owner or mode changed"),
        (errno.EIO, "the disk or its server has failed"),
        (errno.ESTALE, "the file handle is stale"),
        (errno.ETIMEDOUT, "the file server does not answer"),
        (errno.ENOTCONN, "the file system refused"),
    ],
)
def test_no_older_checkpoint_is_taken_for_one_that_cannot_be_read(
    root: Location, refuse: Refuse, file: str, number: int, cause: str
) -> None:
    path = root / "step_0000006" / file
    refuse(path.path, number)
    with pytest.raises(StoreError) as refusal:
        plain_state.load(Alone(), root, ELEMENTS)
    told = str(refusal.value)
    assert f"cannot open {path}: {cause}" in told and os.strerror(number) in told
    assert "no older checkpoint is taken in its place" in told and f"ckpt set-aside {root}/step_0000006)" in told
    assert refusal.value.exit_code == ExitCode.CHECKPOINT and _names(root) == ALL
    if file == MANIFEST_FILE:
        with pytest.raises(StoreError, match="cannot be read and may be whole"):
            newest_step(root)


@pytest.mark.parametrize("kind", ["a folder", "links in a circle", "a link that leads nowhere", "a file in the way"])
def test_what_is_no_file_is_passed_over(root: Location, kind: str) -> None:
    """It was looked at: there is no checkpoint."""
    newest = Path(root.path) / "step_0000006"
    manifest = newest / MANIFEST_FILE
    manifest.unlink()
    if kind == "a folder":
        manifest.mkdir()
    elif kind == "a file in the way":
        (newest / "file").write_text("x")
        manifest.symlink_to("file/x")
    else:
        manifest.symlink_to(MANIFEST_FILE if kind == "links in a circle" else "nowhere")
    assert plain_state.load(Alone(), root, ELEMENTS) == 4


def test_a_client_that_fails_in_a_way_of_its_own_has_read_nothing() -> None:
    def connect() -> LocalBackend:
        raise RuntimeError("the library is of another version")

    with pytest.raises(StoreError, match="of another version") as error:
        Store("other://x", connect).entries("/run")
    assert is_unread(error.value)


@pytest.mark.parametrize(
    ("words", "unread", "outage"),
    [
        ("ChecksumException: Checksum error: /f at 512", True, False),
        ("java.io.IOException: /f is not a directory", False, False),
        ("BlockMissingException: Could not obtain block", True, False),
        ("AccessControlException: Permission denied: user=a", True, False),
        ("something nobody has seen", True, False),
        ("OSError: Connection refused (os error 111)", True, True),
    ],
)
def test_what_a_client_says_of_a_block_is_no_knowledge_of_all_its_replicas(
    words: str, unread: bool, outage: bool
) -> None:
    """One that no data node has now, or of which one replica has rotted, may be back with another."""
    error = StoreError("x", hdfs_cause(words))
    assert (is_unread(error), is_outage(error)) == (unread, outage)


def test_what_is_set_aside_is_gone_on_before_until_it_is_put_back(
    root: Location, refuse: Refuse, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the refusal says; nothing of it is read for that."""
    newest = f"{root}/step_0000006"
    refuse(f"step_0000006/{MANIFEST_FILE}", errno.EIO)
    with pytest.raises(StoreError) as refusal:
        plain_state.load(Alone(), root, ELEMENTS)
    (words,) = re.findall(r"hpc-train (ckpt set-aside .*?)\)", str(refusal.value))
    refuse(f"set-aside/{MANIFEST_FILE}", errno.EIO)
    assert main(words.split()) == 0
    assert plain_state.load(Alone(), root, ELEMENTS) == 4
    assert _names(root) == [*ALL[:2], "step_0000006.set-aside"] and read_latest(root) == "step_0000004"
    prune(root, 4, 1)
    assert _names(root) == ["step_0000004", "step_0000006.set-aside"]
    monkeypatch.undo()
    assert main(["ckpt", "set-aside", f"{newest}.set-aside", "--undo"]) == 0
    assert plain_state.load(Alone(), root, ELEMENTS) == 6 and read_latest(root) == "step_0000006"
    capsys.readouterr()
    for bad, told in (
        ([newest, "--undo"], "was not set aside"),
        ([str(root)], "has no checkpoint's name"),
        ([f"{root}/step_0000009"], "does not exist"),
    ):
        assert main(["ckpt", "set-aside", *bad]) == ExitCode.CHECKPOINT and told in capsys.readouterr().err


@pytest.mark.parametrize("file", [MANIFEST_FILE, "__0_0.distcp"])
def test_verify_and_prune_do_not_take_it_for_damaged(
    root: Location, refuse: Refuse, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    path = root / "step_0000006" / file
    refuse(path.path, errno.EACCES)
    assert main(["ckpt", "verify", root.path, "--all"]) == ExitCode.CHECKPOINT
    told = capsys.readouterr().out
    assert f"step_0000006: cannot be read\n  cannot open {path}: no permission" in told and "damaged" not in told
    assert "step_0000004: sound" in told and "step_0000002: sound" in told
    assert main(["ckpt", "prune", root.path, "--keep", "1"]) == ExitCode.CHECKPOINT
    told = capsys.readouterr().err
    assert f"nothing is removed, since {root}/step_0000006 cannot be read" in told and f"cannot open {path}" in told
    assert _names(root) == ALL


def test_a_run_keeps_what_is_older_than_one_that_cannot_be_read(root: Location, refuse: Refuse) -> None:
    """For all that is known it is one of those to keep, or none."""
    said: list[str] = []
    refuse(f"step_0000004/{MANIFEST_FILE}", errno.EACCES)
    prune(root, 6, 1, said.append)
    assert _names(root) == ALL
    assert len(said) == 1 and "old checkpoints are left: cannot open" in said[0] and "no permission" in said[0]

"""Caches on the node's own disk, in a folder that is ours alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_train.cluster.scratch import CACHE_VARIABLES, cache_variables, private_folder, user_folder_name
from hpc_train.errors import LaunchError

OURS = user_folder_name(os.geteuid())


def test_a_private_folder_is_made_once_and_used_again(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "x")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder(tmp_path / "x") == folder


def test_what_others_could_have_written_to_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(LaunchError, match="can be entered by others"):
        private_folder(tmp_path / "open")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match="is no folder"):
        private_folder(tmp_path / "link")
    with pytest.raises(LaunchError, match="cannot be made"):
        private_folder(tmp_path / "missing" / "x")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of somebody else's")
def test_a_folder_of_somebody_else_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / OURS).mkdir(mode=0o700)
    os.chown(tmp_path / OURS, 65534, 65534)
    with pytest.raises(LaunchError, match="belongs to the user with number 65534"):
        private_folder(tmp_path / OURS)
    variables, note = cache_variables({"TMPDIR": str(tmp_path)})
    assert note is not None and "belongs to the user" in note
    folder = Path(variables["NUMBA_CACHE_DIR"]).parent
    assert folder.stat().st_uid == 0 and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()


def test_caches_go_to_the_node_where_nothing_is_set_and_users_choices_stay(tmp_path: Path) -> None:
    variables, note = cache_variables({"TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": "/mine", "HOME": "/home/me"})
    assert note is None
    assert variables == {
        name: f"{tmp_path}/{OURS}/{folder}" for name, folder in CACHE_VARIABLES.items() if name != "TRITON_CACHE_DIR"
    }
    assert (tmp_path / OURS).stat().st_mode & 0o777 == 0o700


def test_the_folder_that_the_module_named_is_made_and_checked_on_this_node(tmp_path: Path) -> None:
    from_module = {name: f"{tmp_path}/{OURS}/{folder}" for name, folder in CACHE_VARIABLES.items()}
    assert cache_variables({**from_module, "TMPDIR": "/nowhere"}) == (from_module, None)
    assert (tmp_path / OURS).stat().st_mode & 0o777 == 0o700
    assert cache_variables(dict.fromkeys(CACHE_VARIABLES, "/mine")) == ({}, None)

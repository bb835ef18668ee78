"""`module load hpc_train` from a shared install, by Lmod and by Tcl environment modules, as a user without rights."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cluster.scratch import CACHE_VARIABLES, user_folder_name
from tests.launch.configs import write_training_config
from tests.services.centre import MODULE_COMMANDS, Centre, build_centre, setup_centre, snapshot

pytestmark = [pytest.mark.modules, pytest.mark.timeout(300)]

USER = "nobody"


@pytest.fixture(scope="module")
def centre() -> Iterator[Centre]:
    built = build_centre()
    try:
        yield built
    finally:
        built.remove()


@pytest.fixture
def work() -> Iterator[Path]:
    """A folder of the user's."""
    folder = Path(tempfile.mkdtemp(prefix="hpc_train-user-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def give_to_user(folder: Path) -> None:
    account = pwd.getpwnam(USER)
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, account.pw_uid, account.pw_gid)


def shell(kind: str, centre: Centre, text: str) -> list[str]:
    """A user's shell at a site with that kind of modules, and nothing of ours in its environment."""
    lines = [MODULE_COMMANDS[kind](centre.root), f"module use {centre.module_dir}", text]
    clean = ["env", "-u", "PYTHONPATH", "-u", "MPI4PY_LIBMPI", "-u", "MODULEPATH", "-u", "VIRTUAL_ENV", "-u", "TMPDIR"]
    # torch's compiler, once imported, leaves its own in the environment of the tests.
    clean += [word for variable in CACHE_VARIABLES for word in ("-u", variable)]
    return [*clean, "PATH=/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS=1", "bash", "-c", "\n".join(lines)]


@pytest.mark.parametrize("kind", ["lmod", "tcl"])
def test_the_module_sets_what_is_needed_and_takes_back_no_more_than_that(kind: str, centre: Centre) -> None:
    text = (
        # Without what the module systems keep for themselves.
        "show() { env -u BASH_FUNC_module%% | grep -Ev '^(_|SHLVL|LMOD_|LOADEDMODULES|MODULE)' | sort; }\n"
        "export TRITON_CACHE_DIR=/mine\n"
        "show >$0/before; module load hpc_train || exit 9; show >$0/loaded; module help hpc_train 2>$0/help\n"
        "module whatis hpc_train 2>>$0/help >>$0/help; module unload hpc_train; show >$0/after\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*shell(kind, centre, text), folder], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        before, loaded, after, said = (
            (Path(folder) / name).read_text() for name in ("before", "loaded", "after", "help")
        )
    assert after == before
    values = dict(line.split("=", 1) for line in loaded.splitlines() if "=" in line)
    assert values["HPC_TRAIN_ROOT"] == str(centre.install)
    assert values["PATH"].split(":")[0] == f"{centre.install}/bin"
    assert values["MPI4PY_LIBMPI"] == str(centre.libmpi)
    # The modules that ours depends on came along.
    assert values["SITE_MPI"] == str(centre.libmpi.parents[1])
    assert "site-packages" in values["PYTHONPATH"]
    scratch = f"/tmp/{user_folder_name(os.getuid())}"
    caches = {variable: f"{scratch}/{name}" for variable, name in CACHE_VARIABLES.items()}
    assert {variable: values[variable] for variable in caches} == {**caches, "TRITON_CACHE_DIR": "/mine"}
    assert "hpc-train submit" in said and "Version: 0.1.0" in said


@pytest.mark.slurm
@pytest.mark.parametrize("kind", ["lmod", "tcl"])
def test_a_user_without_rights_loads_the_module_and_submits_and_the_install_stays_as_it_was(
    kind: str, centre: Centre, slurm: Any, work: Path
) -> None:
    home = work / "home"
    home.mkdir()
    # With Lmod the script loads the module by itself too, as launch.modules says.
    launch = {"modules": ["hpc_train"]} if kind == "lmod" else {}
    config = write_training_config(work, train={"steps": 2, "log_every": 1}, launch=launch)
    give_to_user(work)
    before = snapshot(centre.root)
    text = (
        f"export HOME={home}; cd {work}; module load hpc_train || exit 9; touch {centre.install}/x && exit 8\n"
        f"hpc-train submit {config} -N 2 --ntasks-per-node 1 --follow"
    )
    done = slurm.run(shell(kind, centre, text), timeout=200, user=USER)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2" in done.stdout
    folder = next((work / "runs" / "little").glob("[0-9]*"))
    assert json.loads((folder / "outcome.json").read_text())["outcome"] == "done"
    job_log = (folder / "logs/job.log").read_text()
    assert f"MPI library: {centre.libmpi}, from MPI4PY_LIBMPI" in job_log
    assert str(centre.install / "bin/python") in job_log
    assert folder.stat().st_uid == pwd.getpwnam(USER).pw_uid
    assert snapshot(centre.root) == before
    assert not list(home.rglob("*")), "something was written to the user's home folder"


def test_setting_up_again_changes_nothing_and_a_live_install_is_never_altered(centre: Centre) -> None:
    before = snapshot(centre.install)
    wheelhouse = centre.root / "wheelhouse"
    env = {"PYTHONPATH": str(centre.libmpi.parent / "unused")}
    said = setup_centre(centre.root, wheelhouse, centre.python, centre.libmpi, centre.module_dir, env)
    assert "is there already, made from the same things" in said
    assert said.count("unchanged: ") == 2
    assert snapshot(centre.install) == before
    with pytest.raises(AssertionError, match="Users may be running it, so it is left as it is"):
        setup_centre(
            centre.root, wheelhouse, centre.python, centre.libmpi, centre.module_dir, env, "--system-site-packages"
        )
    assert snapshot(centre.install) == before


def test_a_damaged_wheelhouse_is_refused_before_anything_is_written(centre: Centre, tmp_path: Path) -> None:
    shutil.copytree(centre.root / "wheelhouse", tmp_path / "wheelhouse")
    wheel = next((tmp_path / "wheelhouse").glob("*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"x")
    with pytest.raises(AssertionError, match="was damaged on its way here"):
        setup_centre(tmp_path, tmp_path / "wheelhouse", centre.python, centre.libmpi, tmp_path / "modules", {})
    assert not (tmp_path / "apps").exists()

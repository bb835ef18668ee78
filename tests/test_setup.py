"""env/*.sh: what they say on a machine that lacks something. (That they work is shown by every test run.)"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _fake(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def _run(
    script: str, *arguments: str, fakes: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    path = f"{fakes}:{os.environ['PATH']}" if fakes else os.environ["PATH"]
    return subprocess.run(
        ["bash", str(ROOT / "env" / script), *arguments],
        env={**os.environ, "PATH": path, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_setup_venv_says_so_when_there_is_no_python_that_fits(tmp_path: Path) -> None:
    for name in ["python3", "python3.11", "python3.12", "python3.13"]:
        _fake(tmp_path, name, '[ "$1" = --version ] && echo "Python 3.9.2" && exit 0; exit 1')
    done = _run("setup_venv.sh", "--venv", str(tmp_path / "venv"), fakes=tmp_path)
    assert done.returncode == 2
    assert "no Python 3.11, 3.12 or 3.13 found (python3 is Python 3.9.2)" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--extras", "tset"], "there is no extra named tset"),
        (["--python", "x"], "unknown argument: --python"),
        (["--venv"], "--venv needs a folder"),
    ],
)
def test_setup_venv_refuses_what_it_does_not_know(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = _run("setup_venv.sh", *arguments)
    assert done.returncode != 0
    assert message in done.stderr


def test_setup_venv_names_the_extras_of_setup_cfg() -> None:
    section = (ROOT / "setup.cfg").read_text().partition("[options.extras_require]")[2].partition("\n[")[0]
    extras = re.findall(r"^(\w+) =", section, re.MULTILINE)
    line = _run("setup_venv.sh", "--help").stdout.splitlines()[1]
    assert sorted(extras) == sorted(re.findall(r"\w+", line.partition("(")[0].partition(":")[2]))


# A dpkg-query that knows all packages but these.
_LACKS = 'case "$*" in *munge|*lmod) exit 1;; *) printf installed;; esac'


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can read, which tmp_path is not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_setup_system_without_root_names_the_command_for_an_administrator(open_folder: Path) -> None:
    _fake(open_folder, "dpkg-query", _LACKS)
    _fake(open_folder, "apt-get", "echo called >&2; exit 1")
    script = shutil.copy(ROOT / "env" / "setup_system.sh", open_folder)
    command = ["bash", str(script)]
    if os.getuid() == 0:
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]
    env = {"PATH": f"{open_folder}:/usr/bin:/bin"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "    apt-get install --no-install-recommends munge lmod" in done.stdout
    assert "are skipped" in done.stdout


def test_setup_system_says_which_packages_it_installs_before_it_does(tmp_path: Path) -> None:
    _fake(tmp_path, "dpkg-query", _LACKS)
    _fake(tmp_path, "apt-get", 'echo "apt-get $*"')
    if os.getuid() != 0:
        pytest.skip("not root: nothing would be installed")
    lines = _run("setup_system.sh", fakes=tmp_path).stdout.splitlines()
    assert lines[0].startswith("setup_system: installing munge lmod")
    assert "update" in lines[1]
    assert lines[2].endswith("install --yes --no-install-recommends munge lmod")


def test_setup_system_does_nothing_when_all_is_there(tmp_path: Path) -> None:
    _fake(tmp_path, "dpkg-query", "printf installed")
    _fake(tmp_path, "apt-get", "echo called >&2; exit 1")
    done = _run("setup_system.sh", fakes=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "present: slurm-wlm libpmix-dev munge iproute2 lmod procps libopenmpi3 tcl ibsim-utils" in done.stdout


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    (folder / "hpc_train-0.1.0-py3-none-any.whl").touch()
    return folder


def _setup_centre(open_folder: Path, wheelhouse: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    prefix = open_folder / "apps"
    done = _run("setup_centre.sh", "--prefix", str(prefix), "--wheelhouse", str(wheelhouse), *arguments)
    assert not prefix.exists(), "something was written before all was known to work"
    return done


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wheelhouse", "/nowhere"], "there is no folder /nowhere"),
        (["--libmpi", "/etc/passwd"], "is no shared library"),
        (["--libmpi", "lib/libmpi.so"], "is no file with an absolute path"),
        (["--mpi-module", "openmpi/5.0"], "without --libmpi"),
        (["--mpi-module", 'x"; os.execute("id")'], "only letters, digits"),
        (["--version", "a/b"], "has a slash in it"),
        (["--scratch", "scratch"], "is not an absolute path"),
        (["--python", "/nowhere/python3"], "there is no program /nowhere/python3"),
        (["--root", "x"], "unknown argument: --root"),
    ],
)
def test_setup_centre_refuses_what_would_not_work(
    arguments: list[str], message: str, open_folder: Path, wheelhouse: Path
) -> None:
    done = _setup_centre(open_folder, wheelhouse, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_setup_centre_refuses_a_python_that_users_cannot_start(open_folder: Path, wheelhouse: Path) -> None:
    """A Python in somebody's home folder."""
    home = open_folder / "home"
    home.mkdir()
    _fake(home, "python3", f'[ "$1" = -c ] || exec python3 "$@"; case $2 in *realpath*) echo {home}/python3;; esac')
    home.chmod(0o700)
    done = _setup_centre(open_folder, wheelhouse, "--python", str(home / "python3"))
    assert done.returncode == 2
    assert f"the Python {home}/python3 lies under {home}, which other users may not enter (drwx------)" in done.stderr


def test_setup_centre_wants_one_wheel_of_hpc_train(open_folder: Path, wheelhouse: Path) -> None:
    (wheelhouse / "hpc_train-0.2.0-py3-none-any.whl").touch()
    assert "has several wheels of hpc_train" in _setup_centre(open_folder, wheelhouse).stderr
    for wheel in wheelhouse.iterdir():
        wheel.unlink()
    assert "has no hpc_train-*.whl" in _setup_centre(open_folder, wheelhouse).stderr


def test_make_wheelhouse_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    for arguments, message in (
        ([], "--out DIR is missing"),
        ([*out, "--extras", "tset"], "there is no extra named tset"),
        ([*out, "--python", "/nowhere/python3"], "is no Python 3.11, 3.12 or 3.13 that works"),
        ([*out, "--pip", "x"], "unknown argument: --pip"),
    ):
        done = _run("make_wheelhouse.sh", *arguments)
        assert done.returncode == 2
        assert message in done.stderr
    assert not (tmp_path / "out").exists()

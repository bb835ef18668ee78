"""The command as a whole on this machine, with mpirun, and a run whose MPI library cannot be loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.cli import main
from tests.launch.configs import write_training_config
from tests.launch.test_exec_mpi import environment

pytestmark = pytest.mark.mpi


def doctor(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpc_train", "doctor", *words],
        cwd=folder,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_on_a_machine_by_itself_two_tasks_are_tried_by_mpirun(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--json", "--verbose")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trying MPI with two tasks by mpirun" in done.stderr
    report = json.loads(done.stdout)
    found = {finding["id"]: finding for finding in report["findings"]}
    assert report["exit_code"] == 0 and len(report["nodes"]) == 1
    assert found["mpi.trial"]["level"] == "ok" and "mpirun connect 2 tasks" in found["mpi.trial"]["found"]
    assert found["slurm.none"]["level"] == found["hdfs.none"]["level"] == "note"
    assert {finding["area"] for finding in report["findings"]} >= {
        "slurm", "mpi", "infiniband", "devices", "network", "limits", "storage", "modules", "python", "hdfs",
    }  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_a_library_that_is_no_mpi_ends_with_3_and_is_named(tmp_path: Path) -> None:
    """FC-92"""
    config = write_training_config(tmp_path)
    done = doctor(tmp_path, str(config), "launch.env.MPI4PY_LIBMPI=" + find_libm())
    assert done.returncode == 3
    assert "mpi4py cannot load an MPI library" in done.stdout and find_libm() in done.stdout
    assert "cure: load the site's MPI module" in done.stdout


def test_a_run_whose_mpi4py_does_not_import_ends_with_3_and_says_which_library(tmp_path: Path) -> None:
    """FC-92"""
    (tmp_path / "stub/mpi4py").mkdir(parents=True)
    (tmp_path / "stub/mpi4py/__init__.py").write_text("class rc: pass\n")
    (tmp_path / "stub/mpi4py/MPI.py").write_text("raise ImportError('undefined symbol: ompi_mpi_info_env')\n")
    config = write_training_config(tmp_path)
    env = environment()
    env["PYTHONPATH"] = f"{tmp_path / 'stub'}:{env['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "hpc_train", "run", str(config), "-n", "2", "--run-dir", str(tmp_path / "run")],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "MPI cannot be loaded: undefined symbol: ompi_mpi_info_env (the library is /" in done.stdout + done.stderr
    assert json.loads((tmp_path / "run/outcome.json").read_text())["exit_code"] == 3


@pytest.mark.parametrize("words", [["--watch-errors", "0"], ["--trial", "--no-trial"], ["--watch-errors", "x"]])
def test_arguments_that_make_no_sense_are_usage_errors(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", *words])
    assert end.value.code == 2


def find_libm() -> str:
    """A library that loads and is no MPI."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libm" in line}
    return next(path for path in sorted(paths) if Path(path).name.startswith(("libm.so", "libm-")))

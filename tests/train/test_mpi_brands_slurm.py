"""The same job under three MPI libraries; each mismatch with Slurm's PMI is refused with its cure (FC-09, FC-92)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services.mpi_brands import LIBRARIES, environment
from tests.train.runs import metrics, write_config, write_corpus
from tests.train.test_run_slurm import ENV, _hpc_train

pytestmark = [pytest.mark.mpi_brands, pytest.mark.slurm, pytest.mark.timeout(300)]

SALLOC = ("salloc", "--quiet", "-N2", "--ntasks-per-node=1")
FITS = {"openmpi5": "pmix", "openmpi4": "pmix", "mpich": "pmi2"}
MISFITS = {"openmpi5": "pmi2", "openmpi4": "pmi2", "mpich": "pmix"}


def test_the_same_job_runs_under_all_three_and_gives_the_same_loss(slurm: Any, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    write_config(tmp_path, steps=2, eval_every=0)
    for kind, plugin in FITS.items():
        words = ["run", str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path / kind)]
        result = _hpc_train(slurm, tmp_path, *words, prefix=SALLOC, env={**ENV, **environment(kind)})
        assert result.returncode == 0, result.stdout + result.stderr
        log = (tmp_path / kind / "logs/job.log").read_text()
        assert f"srun --mpi={plugin} (" in log
        assert str(LIBRARIES[kind]) in log
        assert len(metrics(tmp_path / kind)) == 2
    assert metrics(tmp_path / "openmpi5") == metrics(tmp_path / "openmpi4") == metrics(tmp_path / "mpich")


@pytest.mark.parametrize("kind", list(MISFITS))
def test_a_library_that_does_not_speak_the_plugin_is_refused_with_its_cure(
    kind: str, slurm: Any, tmp_path: Path
) -> None:
    """By the driver before anything starts, and by a script's ranks before MPI could end them without a word."""
    write_corpus(tmp_path / "corpus")
    write_config(tmp_path)
    env = {**ENV, **environment(kind)}
    words = ["run", str(tmp_path / "config.yaml"), "--mpi", MISFITS[kind], "--run-dir", str(tmp_path / "run")]
    result = _hpc_train(slurm, tmp_path, *words, prefix=SALLOC, env=env)
    assert result.returncode == 3, result.stdout + result.stderr
    assert str(LIBRARIES[kind]) in result.stderr
    assert f"hpc-train run --mpi {FITS[kind]}" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "run/logs").glob("n*.log")), "ranks were started"
    script = tmp_path / "script.py"
    script.write_text("import hpc_train\nhpc_train.bootstrap()\n")
    srun = ["srun", f"--mpi={MISFITS[kind]}", "-N2", "-n2", sys.executable, str(script)]
    result = slurm.run(srun, timeout=100, env=env)
    assert result.returncode == 3, result.stdout + result.stderr
    assert result.stderr.count("does not speak") == 1, result.stderr
    assert f"--mpi={FITS[kind]}" in result.stderr


def test_a_module_of_another_brand_is_said_plainly(slurm: Any, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    # A wrapper that cannot be started: what the driver says is all that is wanted here.
    write_config(tmp_path, launch={"wrap": ["/nonexistent/wrapper"]})
    env = {**ENV, **environment("openmpi5"), "LOADEDMODULES": "gcc/12.2:mpich/4.2.1"}
    words = ["run", str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path / "run")]
    result = _hpc_train(slurm, tmp_path, *words, prefix=("salloc", "--quiet", "-N1", "-n1"), env=env)
    assert result.returncode != 0
    log = (tmp_path / "run/logs/job.log").read_text()
    assert "the module mpich/4.2.1 is loaded, but the ranks load another brand, Open MPI 5" in log

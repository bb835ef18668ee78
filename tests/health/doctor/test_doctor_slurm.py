"""The command in real Slurm jobs of two nodes, and outside of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_exec_mpi import ROOT

pytestmark = pytest.mark.slurm

ENV = {"PYTHONPATH": str(ROOT)}
DOCTOR = f"{sys.executable} -m hpc_train doctor"


@pytest.fixture(autouse=True)
def in_a_folder_that_all_nodes_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def by_id(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["id"]: finding for finding in report["findings"]}


def test_in_an_allocation_all_nodes_are_looked_at_and_the_plugin_that_connects_is_found(slurm: Any) -> None:
    """FC-09: pmi2 starts two worlds of one with Open MPI 5, and nothing says so but the trial."""
    script = (
        f"{DOCTOR} --json >good.json; echo $?; {DOCTOR} --json --mpi=pmi2 >wrong.json; echo $?; "
        f"{DOCTOR} -N 2; echo $?; NCCL_SOCKET_IFNAME=ib {DOCTOR} --no-trial >text; echo $?"
    )
    done = slurm.run(["salloc", "--quiet", "-N2", "-p", "low", "sh", "-c", script], timeout=110, env=ENV)
    assert done.stdout.split() == ["0", "3", "2", "3"], done.stdout + done.stderr

    good = json.loads(Path("good.json").read_text())
    found = by_id(good)
    assert good["nodes"] == ["n1", "n2"]
    assert found["mpi.trial"]["level"] == "ok"
    assert "--mpi=pmix connect 2 tasks on n1 and n2 over tcp" in found["mpi.trial"]["found"]
    assert found["storage.shared"]["level"] == found["network.common"]["level"] == "ok"
    assert found["limits.all"]["hostlist"] == found["python.versions"]["hostlist"] == "n[1-2]"
    assert "10 s to save" in found["slurm.preemption"]["found"]

    wrong = by_id(json.loads(Path("wrong.json").read_text()))
    assert wrong["mpi.trial"]["level"] == "error"
    assert "--mpi=pmi2, asked for, does not connect" in wrong["mpi.trial"]["found"]
    assert "--mpi=pmix connect 2 tasks" in wrong["mpi.trial"]["found"]
    assert "hpc-train run --mpi pmix" in wrong["mpi.trial"]["cure"]

    assert "has no effect inside a job" in done.stderr
    assert "NCCL_SOCKET_IFNAME=ib matches nothing here" in Path("text").read_text()
    assert not list(Path().glob(".hpc_train-doctor*")) and not Path("runs").exists()


def test_outside_of_jobs_it_makes_one_when_asked_and_a_job_that_is_gone_is_noticed(slurm: Any) -> None:
    own = slurm.run([*DOCTOR.split(), "-N", "2", "--no-trial", "--json", "--", "--gres=gpu:1"], timeout=60, env=ENV)
    assert own.returncode == 0, own.stdout + own.stderr
    report = json.loads(own.stdout)
    assert len(report["nodes"]) == 2
    assert by_id(report)["slurm.job"]["level"] == "ok"

    login = slurm.run([*DOCTOR.split(), "--json"], timeout=60, env=ENV)
    assert login.returncode == 0, login.stdout + login.stderr
    assert "--trial" in by_id(json.loads(login.stdout))["mpi.trial"]["cure"]

    stale = {**ENV, "SLURM_JOB_ID": "99999", "SLURM_JOB_NODELIST": "n[1-2]"}
    gone = slurm.run([*DOCTOR.split(), "--json"], timeout=60, env=stale)
    assert gone.returncode == 3, gone.stdout + gone.stderr
    assert by_id(json.loads(gone.stdout))["slurm.stale"]["level"] == "error"

    parts = {**stale, "SLURM_HET_SIZE": "2"}
    refused = slurm.run([*DOCTOR.split(), "--json"], timeout=60, env=parts)
    assert refused.returncode == 3
    assert "heterogeneous job of 2 components" in by_id(json.loads(refused.stdout))["slurm.situation"]["found"]

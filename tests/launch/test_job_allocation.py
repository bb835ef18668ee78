"""Who has how many GPUs in a job of `--gpus N`: from Slurm, at every place that lays out ranks."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cluster.allocation import job_without
from hpc_train.cluster.slurm import JobFacts, read_job
from hpc_train.launch import driver
from hpc_train.launch import exec as exec_command
from hpc_train.launch.job_allocation import allocation_of_job
from hpc_train.launch.shell_start import greeting
from tests.cluster.recorded import DATA, recorded
from tests.launch.fakes import FakeCommands


@pytest.fixture
def job() -> JobFacts:
    """--gpus=3 on two nodes, one rank a GPU; two GPUs are here."""
    facts = read_job(*recorded()["batch_total_gpus.0"])
    assert facts is not None
    return replace(facts, job_id="19", num_tasks=None)


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    fakes = FakeCommands(tmp_path / "bin")
    monkeypatch.setenv("PATH", fakes.path)
    fakes.add("scontrol", (DATA / "scontrol_show_job.txt").read_text())
    return fakes


def test_run_exec_and_shell_start_a_rank_for_each_gpu(job: JobFacts, fakes: FakeCommands) -> None:
    asked: Any = Namespace(ranks=None, ranks_per_node=None)
    for found in (driver.find_allocation(asked, job, "n1"), exec_command._allocation(asked, job, "n1")):
        assert (found.tasks_per_node, found.gpus_per_node, found.warnings) == ((2, 1), (2, 1), ())
    assert "3 ranks" in greeting(job, None, 0.0, is_typed=False)[0]
    assert [call["argv"] for call in fakes.calls("scontrol")] == [["show", "job", "-d", "19"]] * 3


def test_fewer_ranks_than_nodes_and_excluded_nodes_keep_the_gpus_of_what_is_left(
    job: JobFacts, fakes: FakeCommands
) -> None:
    assert allocation_of_job(job, num_tasks=1).gpus_per_node == (2,)
    assert allocation_of_job(job_without(replace(job, num_tasks=2), "n1"), num_tasks=1).gpus_per_node == (1,)


def test_where_the_variables_tell_scontrol_is_not_asked(job: JobFacts, fakes: FakeCommands) -> None:
    assert allocation_of_job(replace(job, num_gpus="4")).gpus_per_node == (2, 2)
    assert fakes.calls("scontrol") == []


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"code": 1, "err": "Unable to contact slurm controller"}, "exit code 1: Unable to contact slurm controller"),
        ({"code": 1, "err": "slurm_load_jobs error: Invalid job id specified"}, "scontrol does not know job 19"),
        ({"out": "JobId=19 JobName=x\n     Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:2\n"}, "what job 19 has on n2"),
    ],
)
def test_why_slurm_does_not_tell_is_in_the_warning(
    job: JobFacts, fakes: FakeCommands, answer: dict[str, Any], why: str
) -> None:
    fakes.add("scontrol", **answer)
    found = allocation_of_job(job, num_tasks=2)
    assert found.gpus_per_node == (0, 0)
    assert "SLURM_GPUS=3 over 2 nodes and 2 on this one" in found.warnings[0] and why in found.warnings[0]


def test_three_nodes_that_may_have_equally_many_are_taken_so_where_slurm_does_not_tell(
    job: JobFacts, fakes: FakeCommands
) -> None:
    fakes.add("scontrol", code=1)
    three = replace(job, nodes=("n1", "n2", "n3"), num_nodes=3, num_gpus="6", tasks_per_node=None)
    found = allocation_of_job(three, num_tasks=6)
    assert found.gpus_per_node == (2, 2, 2) and "each is taken to have 2" in found.warnings[0]


def test_without_slurm_s_configuration_no_command_of_slurm_s_is_tried(
    job: JobFacts, fakes: FakeCommands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none.conf"))
    assert "none.conf cannot be read" in allocation_of_job(job, num_tasks=2).warnings[0]
    assert fakes.calls("scontrol") == []

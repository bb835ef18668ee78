from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.slurm import JobFacts, read_job
from hpc_train.launch.steps import (
    StepValues,
    agents_argv,
    agents_env,
    cpus_per_task,
    host_file_text,
    is_uneven,
    ranks_argv,
)

GOLDEN = Path(__file__).parents[1] / "golden"


def allocation(*tasks: int, gpus: int = 0) -> Allocation:
    nodes = tuple(f"n{index + 1:02}" for index in range(len(tasks)))
    return Allocation(nodes, tasks, (gpus,) * len(tasks), "7", "a test")


def job(**variables: str) -> JobFacts:
    facts = read_job({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[01-02]", **variables})
    assert facts is not None
    return facts


def test_the_srun_lines_are_the_golden_ones() -> None:
    """FC-07: --cpus-per-task is on every line. FC-52: the environment goes along whole."""
    command = ["/opt/venv/bin/python", "-m", "hpc_train", "run", "/runs/7/config.yaml"]
    even = StepValues(allocation(8, 8, gpus=8), 6, "pmix", "/runs/7/logs/%N.log")
    uneven = StepValues(allocation(2, 1), 4, "pmi2", None, overlap=True, host_file="/runs/7/hosts.txt", wait_s=0)
    lines = [
        ranks_argv(even, command),
        ranks_argv(uneven, command),
        agents_argv(("n01", "n02"), ["/opt/venv/bin/python", "-m", "hpc_train.node_agent"]),
    ]
    text = "".join("\n  ".join(line) + "\n" for line in lines)
    assert text == (GOLDEN / "srun_lines.txt").read_text()


def test_uneven_ranks_are_placed_by_a_list_of_hosts() -> None:
    assert not is_uneven(allocation(2, 2))
    assert is_uneven(allocation(2, 1))
    assert host_file_text(allocation(2, 1)) == "n01\nn01\nn02\n"


@pytest.mark.parametrize(
    ("variables", "tasks", "cpus"),
    [
        ({"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_CPUS_PER_NODE": "64(x2)"}, (2, 2), 8),
        ({"SLURM_JOB_CPUS_PER_NODE": "64,32"}, (4, 4), 8),
        ({"SLURM_JOB_CPUS_PER_NODE": "2(x2)"}, (4, 4), 1),
        ({}, (4, 4), 1),
    ],
)
def test_the_cpus_of_a_rank_are_what_the_job_grants(
    variables: dict[str, str], tasks: tuple[int, ...], cpus: int
) -> None:
    """FC-07"""
    assert cpus_per_task(job(**variables), allocation(*tasks)) == cpus


def test_the_agents_are_not_given_the_sizes_of_the_ranks() -> None:
    """FC-24: srun reads such variables as options, and two kinds of memory at once end it."""
    env = {
        "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8", "SLURM_MEM_PER_CPU": "100", "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_GPUS_PER_NODE": "8", "SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin",
    }  # fmt: skip
    assert agents_env(env) == {"SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin"}

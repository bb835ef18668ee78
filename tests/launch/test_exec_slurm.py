"""`exec` inside real Slurm jobs of several nodes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch import programs
from tests.launch.test_exec_mpi import ROOT, lines_by_rank

pytestmark = pytest.mark.slurm

ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@pytest.fixture(autouse=True)
def in_a_folder_that_all_nodes_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def exec_in_job(slurm: Any, job: list[str], *program: str) -> subprocess.CompletedProcess[str]:
    command = ["salloc", "--quiet", *job, sys.executable, "-m", "hpc_train", "exec", "--run-dir", "run", "--", *program]
    done: subprocess.CompletedProcess[str] = slurm.run(command, timeout=110, env=ENV)
    return done


def test_a_plain_torch_program_runs_over_two_nodes(slurm: Any) -> None:
    done = exec_in_job(slurm, ["-N2", "--ntasks-per-node=2"], sys.executable, "-c", programs.TORCH)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = lines_by_rank(done.stdout)
    assert lines == {rank: [f"sum 10 size 4 local {rank % 2}"] for rank in range(4)}


def test_a_program_that_uses_mpi4py_itself_runs_over_two_nodes(slurm: Any) -> None:
    job = ["-N2", "--ntasks-per-node=2"]
    done = exec_in_job(slurm, job, sys.executable, "-c", programs.MPI)
    if died_in_mpi_init(done):
        print(f"a rank died in MPI_Init by Open MPI's fault (decision 5), so it is started once more:\n{done.stderr}")
        Path("run").rename("run-that-died")
        done = exec_in_job(slurm, job, sys.executable, "-c", programs.MPI)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines_by_rank(done.stdout) == {rank: ["mpi is up", "mpi 6 of 4"] for rank in range(4)}


def died_in_mpi_init(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether the first rank that failed had a segmentation fault before its program's first line.

    About 1 of 60 starts of such a program, which sends as soon as it has left MPI_Init (open-mpi/ompi#12495).
    """
    if done.returncode != 128 + signal.SIGSEGV:
        return False
    failure = json.loads(Path("run/failure.json").read_text())
    is_up = re.search(rf" r{failure['rank']} \| mpi is up$", done.stdout, re.MULTILINE) is not None
    return failure["exit_code"] == 128 + signal.SIGSEGV and not is_up


def test_ranks_that_do_not_spread_evenly_are_placed_as_planned(slurm: Any) -> None:
    """FC-04, FC-17: rank 0's own address is told, whatever the list of nodes says."""
    done = exec_in_job(slurm, ["-N3", "-n4"], sys.executable, "-c", programs.VARIABLES)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {rank: json.loads(lines[0]) for rank, lines in lines_by_rank(done.stdout).items()}
    rows = [line.split("\t") for line in Path("run/ranks.tsv").read_text().splitlines()[1:]]
    assert [(found[rank]["host"], found[rank]["LOCAL_RANK"]) for rank in range(4)] == [(row[1], row[3]) for row in rows]
    assert [found[rank]["LOCAL_WORLD_SIZE"] for rank in range(4)] == ["2", "2", "1", "1"]
    assert len({(found[rank]["MASTER_ADDR"], found[rank]["MASTER_PORT"]) for rank in range(4)}) == 1
    assert not found[0]["MASTER_ADDR"].startswith("127.")


def test_one_rank_that_fails_ends_the_job_in_seconds_with_its_error(slurm: Any) -> None:
    """The other rank would sleep for ten minutes, for which the job is not waited for."""
    done = exec_in_job(slurm, ["-N2", "--ntasks-per-node=1"], sys.executable, "-c", programs.ONE_FAILS)
    assert done.returncode == 7
    assert "first failure: rank 1 on" in done.stderr
    assert json.loads(Path("run/failure.json").read_text())["exit_code"] == 7


def test_each_node_has_its_agent_and_its_log(slurm: Any) -> None:
    until_ready = 'while [ "$(grep -l "is ready" run/logs/agent-*.log | wc -l)" != 2 ]; do sleep 0.1; done'
    done = exec_in_job(slurm, ["-N2", "--ntasks-per-node=1"], "bash", "-c", until_ready)
    assert done.returncode == 0, done.stdout + done.stderr
    agents = sorted(Path("run/logs").glob("agent-*.log"))
    assert len(agents) == 2
    for log in agents:
        assert "is ready" in log.read_text()
        assert "the driver has ended" in log.read_text()


def test_inside_a_step_exec_refuses_to_start_once_more(slurm: Any) -> None:
    command = ["srun", "-n2", sys.executable, "-m", "hpc_train", "exec", "--", "true"]
    done = slurm.run(command, timeout=60, env=ENV)
    assert done.returncode == 3
    assert "without srun, mpirun or torchrun before it" in done.stderr


def test_sixteen_ranks_that_print_tracebacks_at_once_lose_no_line_and_the_first_failure_is_named(slurm: Any) -> None:
    """FC-99: a file a node, every line whole with time, host and rank."""
    done = exec_in_job(slurm, ["-N2", "--ntasks-per-node=8"], sys.executable, "-u", "-c", programs.TRACEBACKS)
    assert done.returncode == 1
    assert json.loads(Path("run/failure.json").read_text())["rank"] == 5
    assert "first failure: rank 5 on" in done.stderr
    logs = sorted(path for path in Path("run/logs").iterdir() if not path.name.startswith(("agent-", "job")))
    assert len(logs) == 2
    whole = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} (\S+) r(\d+) \| (.*)")
    printed: dict[int, list[str]] = {rank: [] for rank in range(16)}
    for path in logs:
        for line in path.read_text().splitlines():
            found = whole.fullmatch(line)
            if found is None:
                assert line.startswith(("slurmstepd-", "srun: ")), line  # Slurm's own words, whole as well
                continue
            assert found[1] == path.stem
            printed[int(found[2])].append(found[3])
    for lines in printed.values():
        assert [line for line in lines if line.startswith("line ")] == [f"line {n} {'x' * 5000}" for n in range(50)]
        assert sum(line.startswith("RuntimeError: boom") for line in lines) == 50
        assert lines.count("Traceback (most recent call last):") >= 50

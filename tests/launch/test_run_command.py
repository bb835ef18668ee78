"""`run` in its situations, as a process of its own where the environment decides."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from hpc_train.cluster.situation import Found, Situation
from hpc_train.errors import LaunchError
from hpc_train.launch.run_command import rank_folder
from tests.launch.configs import write_config
from tests.launch.fakes import FakeCommands

TORCHRUN = {
    "RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip
BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_CPUS_PER_TASK": "3",
    "SLURM_JOB_CPUS_PER_NODE": "6(x2)",
}  # fmt: skip


def run(config: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    command = [sys.executable, "-m", "hpc_train", "run", str(config), *words]
    return subprocess.run(command, env={**base, **env}, capture_output=True, text=True, timeout=60)


def test_under_torchrun_run_refuses_and_names_the_library_call(tmp_path: Path) -> None:
    """FC-26"""
    done = run(write_config(tmp_path), **TORCHRUN)
    assert done.returncode == 3
    assert 'hpc_train.bootstrap(source="env")' in done.stderr
    assert "Traceback" not in done.stderr


def test_a_step_that_no_driver_started_is_refused_with_the_words_to_use() -> None:
    found = Found(Situation.STEP_TASK, "SLURM_PROCID=0 in the live step 7.0")
    options = Namespace(config="a.yaml", overrides=[])
    with pytest.raises(LaunchError, match="without srun or mpirun before it"):
        rank_folder(options, {"HPC_TRAIN_RUN_DIR": "/runs/7"}, found)
    driven = {"HPC_TRAIN_RUN_DIR": "/runs/7", "HPC_TRAIN_ATTEMPT": "1"}
    assert rank_folder(options, driven, found) == "/runs/7"


@pytest.mark.parametrize(
    ("limit", "words"),
    [("0", "'0' is no limit"), ("0:00", "'0:00' is no limit"), ("soon", "'soon' is no time limit; write minutes")],
)
def test_a_limit_that_would_have_no_effect_is_refused(tmp_path: Path, limit: str, words: str) -> None:
    done = run(write_config(tmp_path), "-n", "1", "--time", limit)
    assert done.returncode == 2
    assert f"--time {words}" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_on_a_machine_without_slurm_the_number_of_ranks_is_never_invented(tmp_path: Path) -> None:
    done = run(write_config(tmp_path))
    assert done.returncode == 2
    assert "number of ranks is not given" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["-n", "2", "train.stepz=3"], 2, "did you mean steps"),
        (["-n", "3"], 2, "global_batch_size"),
        (["-n", "2", "parallel.dp=4"], 2, "2 missing"),
        (["-n", "2", "data.train=[{prefix: nowhere}]"], 4, "nowhere.bin: no such file"),
        (["-n", "2", "--mpi", "pmix"], 3, "--mpi pmix has no effect here"),
    ],
)
def test_what_cannot_work_ends_with_its_code_and_one_message(
    tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    done = run(write_config(tmp_path), *words)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_print_config_shows_the_whole_configuration_and_starts_nothing(tmp_path: Path) -> None:
    done = run(write_config(tmp_path), "train.steps=77", "--print-config")
    assert done.returncode == 0
    assert "steps: 77" in done.stdout
    assert "beta1: 0.9" in done.stdout


@pytest.fixture
def slurm_fakes(tmp_path: Path) -> FakeCommands:
    fakes = FakeCommands(tmp_path / "bin")
    fakes.add("srun", "MPI plugin types are...\n\tpmix\n\tpmi2\n\tnone\n")
    fakes.add("scontrol", "MpiDefault              = pmix\n")
    fakes.add("squeue", "7|RUNNING|little|1:00|1:00:00|n[1-2]\n")
    return fakes


def test_variables_of_a_job_that_has_ended_are_refused_in_words(tmp_path: Path, slurm_fakes: FakeCommands) -> None:
    """FC-24: a terminal multiplexer once started inside a job still has its variables."""
    slurm_fakes.add("squeue", "")
    done = run(write_config(tmp_path), **{**BATCH, "PATH": slurm_fakes.path})
    assert done.returncode == 3
    assert "SLURM_JOB_ID=7 is set, but Slurm has no such job any more" in done.stderr
    assert not slurm_fakes.calls("srun")
    assert not (tmp_path / "runs").exists()


def test_in_a_batch_script_run_plans_and_calls_srun(tmp_path: Path, slurm_fakes: FakeCommands) -> None:
    """FC-02, FC-07"""
    folder = tmp_path / "runs" / "little" / "7"
    done = run(write_config(tmp_path), **{**BATCH, "PATH": slurm_fakes.path})
    assert done.returncode == 0, done.stderr
    calls = slurm_fakes.calls("srun")
    ranks = next(call for call in calls if "hpc_train" in call["argv"] and "run" in call["argv"])
    agents = next(call for call in calls if "hpc_train.node_agent" in call["argv"])
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=3"} <= set(ranks["argv"])
    assert f"--output={folder}/logs/%N.log" in ranks["argv"]
    assert ranks["env"]["HPC_TRAIN_RUN_DIR"] == str(folder)
    assert ranks["env"]["HPC_TRAIN_ATTEMPT"] == "1"
    assert ranks["env"]["OMP_NUM_THREADS"] == "3"
    assert "--overlap" in agents["argv"]
    assert "this is a batch script" in done.stdout
    assert (folder / "ranks.tsv").read_text().count("\n") == 5
    assert not (folder / "owner.json").exists()


def test_what_the_user_set_is_not_replaced(tmp_path: Path, slurm_fakes: FakeCommands) -> None:
    env = {**BATCH, "PATH": slurm_fakes.path, "OMP_NUM_THREADS": "11"}
    done = run(write_config(tmp_path, launch={"env": {"NCCL_DEBUG": "WARN"}}), **env)
    assert done.returncode == 0, done.stderr
    (seen,) = [call["env"] for call in slurm_fakes.calls("srun") if "run" in call["argv"]]
    assert (seen["OMP_NUM_THREADS"], seen["NCCL_DEBUG"]) == ("11", "WARN")
    assert "OMP_NUM_THREADS=11 (kept" in done.stdout


def test_a_job_that_comes_back_counts_its_attempts_and_parts_them_in_the_logs(
    tmp_path: Path, slurm_fakes: FakeCommands
) -> None:
    slurm_fakes.add("srun", "pmix\n", code=9)
    env = {**BATCH, "PATH": slurm_fakes.path}
    config = write_config(tmp_path, launch={"mpi": "pmix"})
    assert run(config, **env).returncode == 1
    folder = tmp_path / "runs" / "little" / "7"
    (folder / "logs" / "n1.log").write_text("of the first attempt\n")
    again = run(config, **{**env, "SLURM_RESTART_COUNT": "1"})
    assert "==== attempt 2, job 7, " in again.stdout
    assert "==== attempt 2, job 7, " in (folder / "logs" / "n1.log").read_text()
    assert (folder / "outcome-1.json").exists()

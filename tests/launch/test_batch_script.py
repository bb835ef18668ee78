from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.errors import ConfigError
from hpc_train.launch.batch_script import BatchValues, batch_script

GOLDEN = Path(__file__).parents[1] / "golden"

VALUES = BatchValues(
    name="llama-7b",
    flags={"nodes": "4", "ntasks-per-node": "8", "gpus-per-node": "8", "time": "4:00:00", "exclusive": ""},
    runs_dir="/scratch/me/runs",
    run_dir=None,
    config_yaml="name: llama-7b\nnote: '$HOME `date`'\n",
    request_json='{"world_size": 32}\n',
    python="/opt/venv/bin/python",
    version="0.1.0",
)
AWKWARD = replace(
    VALUES,
    flags={"ntasks": "2", "array": "0-3%2", "comment": 'it\'s a "test" of $HOME', "job-name": "two words"},
    runs_dir="/scratch/a b/100%/runs",
    config_yaml="name: x\nEND_OF_FILE\n@PYTHON@\n",
    python="/opt/my venv/bin/python",
    modules=("openmpi/5.0", "it's"),
    mpi="pmix",
    verbatim=("--nice=100", "--mail-user", "me and you"),
)


@pytest.mark.parametrize(("name", "values"), [("submit.sh", VALUES), ("submit_awkward.sh", AWKWARD)])
def test_the_script_is_the_golden_one(name: str, values: BatchValues) -> None:
    assert batch_script(values) == (GOLDEN / name).read_text()


@pytest.mark.parametrize("values", [VALUES, AWKWARD, replace(VALUES, run_dir="/x y/it's $HOME")])
def test_the_script_is_sound_bash(values: BatchValues) -> None:
    subprocess.run(["bash", "-n"], input=batch_script(values), text=True, check=True)


def test_a_line_break_in_a_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--comment has a line break"):
        batch_script(replace(VALUES, flags={"comment": "one\n#SBATCH --account=theirs"}))


class Job:
    """Runs a script as a job would, with a stand-in for the Python that it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "my python"
        self.python.write_text('#!/bin/bash\necho "$HPC_TRAIN_RUN_DIR|$*"\nexit 7\n')
        self.python.chmod(0o755)
        self.values = replace(VALUES, runs_dir=str(folder / "the runs"), python=str(self.python))

    def run(self, values: BatchValues, **env: str) -> subprocess.CompletedProcess[str]:
        script = self.folder / "slurm_script"
        script.write_text(batch_script(values))
        path = {"PATH": os.environ["PATH"]}
        return subprocess.run(["bash", str(script)], env={**path, **env}, capture_output=True, text=True, check=False)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_the_job_makes_its_folder_whole_and_hands_over_to_run(job: Job) -> None:
    done = job.run(job.values, SLURM_JOB_ID="31")
    folder = job.folder / "the runs" / "llama-7b" / "31"
    assert done.returncode == 7
    assert done.stdout == f"hpc-train: the log of this job is {folder}/logs/job.log\n"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.request.yaml", "logs", "plan.request.json", "submit.sh",
    ]  # fmt: skip
    assert (folder / "config.request.yaml").read_text() == job.values.config_yaml
    assert (folder / "submit.sh").read_text() == batch_script(job.values)
    assert (folder / "logs" / "job.log").read_text() == (
        f"{folder}|-m hpc_train run {folder}/config.request.yaml --run-dir {folder}\n"
    )
    assert [path.name for path in folder.parent.iterdir()] == ["31"]


def test_a_requeued_job_finds_its_folder_and_appends_to_its_log(job: Job) -> None:
    for _ in range(2):
        job.run(job.values, SLURM_JOB_ID="31")
    folder = job.folder / "the runs" / "llama-7b" / "31"
    assert len((folder / "logs" / "job.log").read_text().splitlines()) == 2
    assert [path.name for path in folder.parent.iterdir()] == ["31"]


@pytest.mark.parametrize(("task", "job_id"), [("1", "30"), ("2", "29")])
def test_each_task_of_an_array_has_its_own_folder(job: Job, task: str, job_id: str) -> None:
    """FC-37: the last task of an array has the array's own id as its job id."""
    job.run(job.values, SLURM_JOB_ID=job_id, SLURM_ARRAY_JOB_ID="29", SLURM_ARRAY_TASK_ID=task)
    assert (job.folder / "the runs" / "llama-7b" / f"29_{task}" / "logs" / "job.log").exists()


def test_in_a_given_folder_the_new_settings_replace_the_old_ones(job: Job) -> None:
    folder = job.folder / "it's $HOME"
    (folder / "logs").mkdir(parents=True)
    (folder / "config.request.yaml").write_text("old")
    (folder / "metrics.jsonl").write_text("kept")
    job.run(replace(job.values, run_dir=str(folder)), SLURM_JOB_ID="31")
    assert (folder / "config.request.yaml").read_text() == job.values.config_yaml
    assert (folder / "metrics.jsonl").read_text() == "kept"
    assert (folder / "logs" / "job.log").exists()
    assert not list(job.folder.glob("*.new.*"))


def test_a_module_that_cannot_be_loaded_ends_the_job_with_the_launch_code(job: Job) -> None:
    done = job.run(replace(job.values, modules=("no/such",)), SLURM_JOB_ID="31")
    log = (job.folder / "the runs" / "llama-7b" / "31" / "logs" / "job.log").read_text()
    assert done.returncode == 3
    assert "hpc-train: error: the module no/such cannot be loaded" in log


def test_outside_of_a_job_the_script_stops(job: Job) -> None:
    done = job.run(job.values)
    assert done.returncode == 3
    assert "this script is for sbatch" in done.stderr

"""Requeueing by a real Slurm, with a stand-in for the driver: through sbatch and submitit, plain and in arrays."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_exec_slurm import ENV

pytestmark = pytest.mark.slurm

# Its first start ends with 10: at once in runs named `plain`, else when a signal asks for it. The second ends with 0.
DRIVER = """\
#!{python}
import os, signal, sys, time
folder = os.environ["HPC_TRAIN_RUN_DIR"]
restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
caught = []
signal.signal(signal.SIGUSR2, lambda number, frame: caught.append("USR2"))
signal.signal(signal.SIGTERM, lambda number, frame: caught.append("TERM"))
print("start after", restarts, "requeues", flush=True)
if restarts == "0" and "signalled" in folder:
    open(folder + "/ready", "w").close()
    end = time.monotonic() + 60
    while not caught and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)
with open(folder + "/starts", "a") as file:
    print(restarts, *caught, file=file)
sys.exit(10 if restarts == "0" else 0)
"""

SUBMIT = """\
import sys
from hpc_train.cluster.environment import process_env
from hpc_train.launch.batch_script import BatchValues
from hpc_train.launch import submit, via_submitit
name, via, *flags = sys.argv[2:]
values = BatchValues(
    name=name, flags={"ntasks": "1", **dict(flag.split("=", 1) for flag in flags)}, runs_dir=sys.argv[1] + "/the runs",
    run_dir=None, config_yaml="name: x\\n", request_json="{}\\n", python=sys.argv[1] + "/a driver", version="0",
)
submit.make_output_folder(values)
print((via_submitit.submit if via == "submitit" else submit.submit_by_sbatch)(values, process_env()))
"""


class Submitter:
    """Submits stand-in runs; each run's name is its way of submission and what happens to it."""

    def __init__(self, slurm: Any, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        driver = folder / "a driver"
        driver.write_text(DRIVER.format(python=sys.executable))
        driver.chmod(0o755)

    def submit(self, name: str, via: str, *flags: str) -> str:
        done: subprocess.CompletedProcess[str] = self.slurm.run(
            [sys.executable, "-c", SUBMIT, str(self.folder), name, via, *flags], env=ENV
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def run_dir(self, name: str, job: str) -> Path:
        return self.folder / "the runs" / name / job

    def show(self, job: str) -> dict[str, str]:
        text = self.slurm.run(["scontrol", "--oneliner", "show", "job", job]).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)


def wait_for(what: str, condition: Any, limit_s: float = 90.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for {what}"
        time.sleep(0.2)


@pytest.fixture
def submitter(slurm: Any, tmp_path: Path) -> Submitter:
    return Submitter(slurm, tmp_path)


def test_every_kind_of_job_is_requeued_once_and_by_itself_alone(submitter: Submitter) -> None:
    """FC-27, FC-37"""
    plain: dict[str, Path] = {}
    signalled: dict[str, Path] = {}
    for via in ("sbatch", "submitit"):
        job = submitter.submit(f"plain-{via}", via)
        plain[job] = submitter.run_dir(f"plain-{via}", job)
        array = submitter.submit(f"plain-{via}", via, "array=0-1")
        for task in ("0", "1"):
            plain[f"{array}_{task}"] = submitter.run_dir(f"plain-{via}", f"{array}_{task}")
        job = submitter.submit(f"signalled-{via}", via)
        signalled[job] = submitter.run_dir(f"signalled-{via}", job)
    for job, folder in signalled.items():
        wait_for(f"job {job}", (folder / "ready").exists)
        submitter.slurm.run(["scancel", "--batch", "--signal=USR2", job])
    everything = {**plain, **signalled}
    for job, folder in everything.items():
        wait_for(
            f"two starts of job {job}", lambda f=folder: (f / "starts").exists() and "1" in (f / "starts").read_text()
        )
    wait_for("the ends", lambda: {submitter.show(job)["JobState"] for job in everything} == {"COMPLETED"})
    for job, folder in everything.items():
        first = "0 USR2" if job in signalled else "0"
        assert (folder / "starts").read_text().splitlines() == [first, "1"], job
        assert submitter.show(job)["Restarts"] == "1", job
        log = (folder / "logs" / "job.log").read_text()
        assert log.count(f"job {job} goes back into the queue: restart 1 of 100 at most") == 1, log
        assert "start after 1 requeues" in log

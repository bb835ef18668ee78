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

# Its first start ends with 10: at once in runs named `plain`, else when it or a step of it was signalled. The second
# start ends with 0.
DRIVER = '''\
#!{python}
import os, signal, subprocess, sys, time
STEP = """
import signal, sys, time
def catch(number, frame):
    open(sys.argv[1] + '/step-caught', 'w').close()
    sys.exit()
signal.signal(signal.SIGUSR2, catch)
open(sys.argv[1] + '/ready', 'w').close()
time.sleep(180)
"""
folder = os.environ["HPC_TRAIN_RUN_DIR"]
restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
caught = []
signal.signal(signal.SIGUSR2, lambda number, frame: caught.append("USR2"))
signal.signal(signal.SIGTERM, lambda number, frame: caught.append("TERM"))
print("start after", restarts, "requeues", flush=True)
if restarts == "0" and "plain" not in folder:
    step = subprocess.Popen(["srun", "--quiet", "-n1", sys.executable, "-c", STEP, folder])
    while not os.path.exists(folder + "/ready"):
        time.sleep(0.05)
    end = time.monotonic() + 170
    while not caught and step.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)
    step.kill()
with open(folder + "/starts", "a") as file:
    print(restarts, *caught, file=file)
sys.exit(10 if restarts == "0" else 0)
'''

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

    def limit(self, job: str, *, minutes: int) -> None:
        """Change a job's time limit."""
        done = self.slurm.run(["scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}"])
        assert done.returncode == 0, done.stderr

    def show(self, job: str) -> dict[str, str]:
        text = self.slurm.run(["scontrol", "--oneliner", "show", "job", job]).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)


def wait_for(what: str, condition: Any, limit_s: float = 180.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for {what}"
        time.sleep(0.2)


@pytest.fixture
def submitter(slurm: Any, tmp_path: Path) -> Submitter:
    return Submitter(slurm, tmp_path)


def test_every_kind_of_job_is_requeued_once_and_by_itself_alone(submitter: Submitter) -> None:
    """FC-27, FC-37. Some end by themselves, some by --signal, in its two forms."""
    runs: dict[str, Path] = {}

    def submit(name: str, via: str, *flags: str) -> str:
        job = submitter.submit(f"{name}-{via}", via, *flags)
        tasks = [f"{job}_0", f"{job}_1"] if "array=0-1" in flags else [job]
        runs.update({task: submitter.run_dir(f"{name}-{via}", task) for task in tasks})
        return job

    vias = ("sbatch", "submitit")
    # The signal of a job that has not started its step yet would go to nobody.
    to_shell = {submit("shell", via, "time=20", "signal=B:USR2@180") for via in vias}
    to_steps = submit("steps", "sbatch", "time=20", "signal=USR2@180")
    for via in vias:
        submit("plain", via)
        submit("plain", via, "array=0-1")
    for job in (*to_shell, to_steps):
        wait_for(f"the step of job {job}", (runs[job] / "ready").exists)
        # Slurm looks at time limits every half minute, and sends the signal then: the limit is less than 180 s away.
        submitter.limit(job, minutes=3)
    for job, folder in runs.items():
        wait_for(f"two starts of job {job}", lambda f=folder: len(lines_of(f / "starts")) >= 2)
    wait_for("the ends", lambda: {submitter.show(job)["JobState"] for job in runs} == {"COMPLETED"})
    for job, folder in runs.items():
        assert lines_of(folder / "starts") == ["0 USR2" if job in to_shell else "0", "1"], folder
        assert (folder / "step-caught").exists() == (job == to_steps), folder
        assert submitter.show(job)["Restarts"] == "1", folder
        log = (folder / "logs" / "job.log").read_text()
        assert log.count(f"job {job} goes back into the queue: restart 1 of 100 at most") == 1, log
        assert "start after 1 requeues" in log


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []

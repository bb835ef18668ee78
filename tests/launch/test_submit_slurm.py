"""`submit` on a real Slurm cluster, with real training over nodes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.configs import write_training_config
from tests.launch.test_exec_slurm import ENV

pytestmark = pytest.mark.slurm


@pytest.fixture(autouse=True)
def in_a_folder_that_all_nodes_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def hpc_train(slurm: Any, *words: str, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = slurm.run(
        [sys.executable, "-m", "hpc_train", *words], timeout=timeout, env=ENV
    )
    return done


def wait_for(what: str, condition: Any, limit_s: float = 90.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for {what}"
        time.sleep(0.2)


def test_a_submitted_run_trains_over_two_nodes_and_is_followed_to_its_end(slurm: Any, tmp_path: Path) -> None:
    config = write_training_config(tmp_path, train={"steps": 4, "log_every": 1})
    done = hpc_train(
        slurm, "submit", str(config), "-N", "2", "--ntasks-per-node", "2", "--comment", 'it\'s "mine"', "--follow"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 4/4" in done.stdout
    folder = next((tmp_path / "runs" / "little").glob("[0-9]*"))
    assert json.loads((folder / "outcome.json").read_text())["outcome"] == "done"
    table = [line.split("\t") for line in (folder / "ranks.tsv").read_text().splitlines()]
    assert sorted((row[2], row[3]) for row in table[1:]) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    # Each rank logs in its node's file; the job's log shows rank 0's progress.
    assert "step 4/4" in (folder / "logs" / "job.log").read_text()
    assert "this is a batch script" in (folder / "logs" / "job.log").read_text()
    status = hpc_train(slurm, "status", folder.name, "--json")
    assert json.loads(status.stdout)[0] | {"run_dir": "", "note": ""} == {
        "run_dir": "", "name": "little", "job_id": folder.name, "state": "done", "attempt": 1, "step": 4,
        "loss": json.loads(status.stdout)[0]["loss"], "tokens_per_s": None, "exit_code": 0, "note": "", "damaged": [],
    }  # fmt: skip


def test_each_task_of_an_array_is_a_run_in_its_own_folder(slurm: Any, tmp_path: Path) -> None:
    """FC-37"""
    config = write_training_config(tmp_path, train={"steps": 1})
    done = hpc_train(slurm, "submit", str(config), "-n", "1", "--array=0-1", "--parsable")
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    folders = [tmp_path / "runs" / "little" / f"{job}_{task}" for task in (0, 1)]
    wait_for("both tasks", lambda: all((folder / "outcome.json").exists() for folder in folders))
    assert [json.loads((folder / "outcome.json").read_text())["job_id"] for folder in folders] == [
        f"{job}_0", f"{job}_1",
    ]  # fmt: skip
    assert [run["job_id"] for run in json.loads(hpc_train(slurm, "status", job, "--json").stdout)] == [
        f"{job}_0", f"{job}_1",
    ]  # fmt: skip


def test_a_chain_at_work_is_cancelled_whole_and_its_folder_can_be_gone_on_with(slurm: Any, tmp_path: Path) -> None:
    config = write_training_config(
        tmp_path, train={"steps": 100000, "log_every": 1}, checkpoint={"every": 5, "keep": 2}
    )
    submitted = hpc_train(slurm, "submit", str(config), "-n", "1", "--chain", "3", "--parsable")
    job, *later = submitted.stdout.split()
    folder = tmp_path / "runs" / "little" / job
    wait_for("a checkpoint", lambda: list(folder.glob("checkpoints/step_*")))
    refused = hpc_train(slurm, "submit", str(config), "-n", "1", "--run-dir", str(folder))
    assert refused.returncode == 2
    assert f"Slurm job {job}" in refused.stderr
    cancelled = hpc_train(slurm, "cancel", job)
    assert cancelled.returncode == 0, cancelled.stderr
    assert f"jobs {later[0]}, {later[1]} submitted to go on with it" in cancelled.stdout
    wait_for("its end", lambda: (folder / "outcome.json").exists() and not (folder / "owner.json").exists())
    assert json.loads((folder / "outcome.json").read_text())["outcome"] == "interrupted"
    assert not set(later) & set(slurm.run(["squeue", "--noheader", "--format=%i"]).stdout.split())
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    steps = last + 3
    again = hpc_train(
        slurm, "submit", str(config), f"train.steps={steps}", "-n", "1", "--run-dir", str(folder), "--follow"
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"step {steps}/{steps}" in again.stdout
    assert "==== attempt 2" in (folder / "logs" / "job.log").read_text()

"""`run` on this machine, by mpirun, with real training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.configs import write_training_config
from tests.launch.test_exec_mpi import environment

pytestmark = pytest.mark.mpi


def run(folder: Path, config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpc_train", "run", str(config), "-n", "2", "--run-dir", str(folder / "run")]
    return subprocess.run(
        [*command, *words],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_a_run_trains_leaves_its_records_and_is_gone_on_with(tmp_path: Path) -> None:
    config = write_training_config(tmp_path)
    done = run(tmp_path, config)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "run"
    outcome = json.loads((folder / "outcome.json").read_text())
    assert (outcome["outcome"], outcome["exit_code"], outcome["attempt"]) == ("done", 0, 1)
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert {"config.yaml", "plan.json", "ranks.tsv", "env.txt", "metrics.jsonl"} <= {
        path.name for path in folder.iterdir()
    }
    assert not (folder / "owner.json").exists()

    again = run(tmp_path, config)
    assert again.returncode == 0
    assert "is done already" in again.stdout

    longer = run(tmp_path, config, "train.steps=3")
    assert longer.returncode == 0, longer.stdout + longer.stderr
    assert "changed since the last attempt: train.steps: 2 -> 3" in longer.stdout
    assert "==== attempt 2" in longer.stdout

    other = run(tmp_path, config, "model.hidden_size=32")
    assert other.returncode == 2
    assert "another model" in other.stderr

"""`stacks` on a real job that hangs, and that goes on afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cluster.stack_dump import process_state
from tests.faults.plan import VARIABLE, FaultPlan
from tests.train.runs import metrics, write_config, write_corpus
from tests.train.test_run_slurm import ENV, ROOT, _hpc_train

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(500)]


def _stacks(slurm: Any, folder: Path, *words: str) -> Any:
    done = _hpc_train(slurm, folder, "stacks", str(folder / "run"), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout) if "--json" in words else done.stdout


def _wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < step:
        assert time.monotonic() < deadline, f"waited for step {step}"
        time.sleep(0.1)


def test_the_rank_that_does_not_answer_and_the_one_that_hangs_are_shown_and_the_job_ends_well(
    slurm: Any, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "corpus")
    plan = FaultPlan().stop(rank=2, step=2).hang(rank=1, step=4)
    launch = {"env": {VARIABLE: plan.environment()[VARIABLE]}, "timeout_s": 600}  # ranks wait while we look at them
    write_config(tmp_path, eval_every=0, launch=launch)
    env = {**ENV, "PYTHONPATH": f"{plan.environment()['PYTHONPATH']}:{ROOT}"}
    words = ["submit", str(tmp_path / "config.yaml"), "-N", "2", "--ntasks-per-node", "2"]
    submitted = _hpc_train(slurm, tmp_path, *words, "--run-dir", str(tmp_path / "run"), env=env)
    assert submitted.returncode == 0, submitted.stderr

    _wait_for_step(tmp_path / "run", 1)
    deadline = time.monotonic() + 90
    while not str((told := _stacks(slurm, tmp_path, "--json"))["ranks"][2]["problem"]).startswith("it is stopped"):
        assert time.monotonic() < deadline, told
    assert [(entry["rank"], entry["node"]) for entry in told["ranks"]] == [(0, "n1"), (1, "n1"), (2, "n2"), (3, "n2")]
    assert told["silent_nodes"] == []
    stopped = told["ranks"][2]
    assert process_state(stopped["pid"]) == "T"
    os.kill(stopped["pid"], signal.SIGCONT)

    _wait_for_step(tmp_path / "run", 3)
    deadline = time.monotonic() + 90
    waiting = r"^3 ranks: 0, 2-3\n(    .*\n)*    await_(parameters|gradients)  hpc_train/parallel/data\.py:"
    while not re.search(waiting, text := _stacks(slurm, tmp_path), re.MULTILINE) or "    _hang  " not in text:
        assert time.monotonic() < deadline, text
    odd = text.partition("1 rank: 1 <- differs from the others\n")[2]
    assert odd.startswith("    _hang  "), text

    (tmp_path / "run/go_on").touch()
    deadline = time.monotonic() + 90
    while not (tmp_path / "run/outcome.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert json.loads((tmp_path / "run/outcome.json").read_text())["outcome"] == "done"
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]

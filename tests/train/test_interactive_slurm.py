"""People at work in one allocation: run, fail, mend, run again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.plan import VARIABLE, FaultPlan
from tests.train.runs import metrics, write_config, write_corpus
from tests.train.test_run_slurm import ENV, ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def _in_one_allocation(slurm: Any, folder: Path, lines: list[str]) -> Any:
    """Have `hpc-train shell` read these lines on 2 nodes of a rank each; each line's exit code is printed."""
    script = folder / "lines.sh"
    script.write_text("".join(f'{line}\necho "exit code $?"\n' for line in lines))
    command = f'cd "{folder}" && "{sys.executable}" -m hpc_train shell -N 2 --ntasks-per-node=1 <"{script}"'
    path = [str(Path(__file__).parents[1] / "faults/hook"), str(ROOT)]
    return slurm.run(["bash", "-c", command], timeout=280, env={**ENV, "PYTHONPATH": os.pathsep.join(path)})


DEBUGGER = """\
p ("rank", world.rank, "of", world.world_size)
tbreak hpc_train.train.loop:{line}
c
p ("step", run.step)
import time; time.sleep(5)
"""
"""The others wait for longer than launch.timeout_s; then the input ends, and the rank goes on without a debugger."""


def _line_after_the_first_step() -> int:
    lines = (ROOT / "hpc_train/train/loop.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if "result = run.trainer.step(" in line) + 1


def test_in_one_allocation_a_run_fails_is_gone_on_with_and_another_one_is_debugged_in_its_own_folder(
    slurm: Any, tmp_path: Path
) -> None:
    """FC-01: the shell of an allocation has a task count and no rank; `run` starts srun itself, each time."""
    write_corpus(tmp_path / "corpus")
    fault = FaultPlan().fail(rank=1, step=4).environment()[VARIABLE]
    write_config(tmp_path, launch={"env": {VARIABLE: fault}}).rename(tmp_path / "bad.yaml")
    write_config(tmp_path)
    (tmp_path / "typed").write_text(DEBUGGER.format(line=_line_after_the_first_step()))
    done = _in_one_allocation(
        slurm,
        tmp_path,
        [
            "hpc-train run bad.yaml --run-dir first",
            "hpc-train run config.yaml --run-dir first",
            "hpc-train run config.yaml launch.timeout_s=3 --debug-rank 1 <typed",
            "hpc-train run config.yaml train.stepz=3",
            "hpc-train shell -N 1 </dev/null",
        ],
    )
    codes = [line for line in done.stdout.splitlines() if line.startswith("exit code")]
    assert codes == ["exit code 1", "exit code 0", "exit code 0", "exit code 2", "exit code 3"], (
        done.stdout + done.stderr
    )
    assert done.returncode == 0
    assert "planned fault on rank 1 at step 4" in done.stderr
    assert "2 ranks, " in done.stderr
    (other,) = (tmp_path / "runs/test").iterdir()
    assert json.loads((tmp_path / "first/outcome.json").read_text())["attempt"] == 2
    assert "resumed from" in done.stdout
    assert metrics(tmp_path / "first") == metrics(other)
    assert "(rank 1) ('rank', 1, 'of', 2)\n" in done.stdout
    assert "(rank 1) ('step', 1)\n" in done.stdout
    assert "goes on without a debugger" in done.stdout
    assert "--wait=0" in (other / "logs/job.log").read_text()
    assert "type `hpc-train run CONFIG` here" in done.stderr

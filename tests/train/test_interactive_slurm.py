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
    """Have `hpc-train shell` read these lines on 2 nodes of 2 ranks; each line's exit code is printed."""
    script = folder / "lines.sh"
    script.write_text("".join(f'{line}\necho "exit code $?"\n' for line in lines))
    command = f'cd "{folder}" && "{sys.executable}" -m hpc_train shell -N 2 --ntasks-per-node=2 <"{script}"'
    path = [str(Path(__file__).parents[1] / "faults/hook"), str(ROOT)]
    return slurm.run(["bash", "-c", command], timeout=240, env={**ENV, "PYTHONPATH": os.pathsep.join(path)})


def test_in_one_allocation_a_run_fails_is_gone_on_with_and_another_one_has_its_own_folder(
    slurm: Any, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "corpus")
    fault = FaultPlan().fail(rank=3, step=4).environment()[VARIABLE]
    write_config(tmp_path, launch={"env": {VARIABLE: fault}}).rename(tmp_path / "bad.yaml")
    write_config(tmp_path)
    done = _in_one_allocation(
        slurm,
        tmp_path,
        [
            "hpc-train run bad.yaml --run-dir first",
            "hpc-train run config.yaml --run-dir first",
            "hpc-train run config.yaml",
            "hpc-train run config.yaml train.stepz=3",
        ],
    )
    codes = [line for line in done.stdout.splitlines() if line.startswith("exit code")]
    assert codes == ["exit code 1", "exit code 0", "exit code 0", "exit code 2"], done.stdout + done.stderr
    assert done.returncode == 0
    assert "planned fault on rank 3 at step 4" in done.stderr
    assert "4 ranks, " in done.stderr
    (other,) = (tmp_path / "runs/test").iterdir()
    assert json.loads((tmp_path / "first/outcome.json").read_text())["attempt"] == 2
    assert "resumed from" in done.stdout
    assert metrics(tmp_path / "first") == metrics(other)

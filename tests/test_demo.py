"""The demo, as `make demo` runs it once its environment is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import mpi_environment, run_tree

ROOT = Path(__file__).parents[1]


@pytest.mark.mpi
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "settings",
    [pytest.param(["train.steps=80"], id="short"), pytest.param([], id="whole", marks=pytest.mark.long)],
)
def test_the_demo_learns_from_real_text_and_reports_it(tmp_path: Path, settings: list[str]) -> None:
    environment = mpi_environment()
    del environment["OMP_NUM_THREADS"]
    command = ["bash", str(ROOT / "env/demo.sh"), "--venv", sys.prefix, "--in", str(tmp_path), "--no-setup"]
    done = run_tree([*command, *settings], env=environment, timeout_s=800, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = (tmp_path / "demo").glob("run-*/report.json")
    figures = json.loads(report.read_text())
    assert figures["gain_nats"] >= 0.5
    assert figures["ranks"] == 4
    assert (report.parent / "loss.png").stat().st_size > 10_000
    assert "What to try next" in done.stdout


def test_the_demo_refuses_an_unknown_option() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "env/demo.sh"), "--fast"], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.returncode == 2
    assert "usage" in done.stderr

"""`run --debug-rank` on this machine, by mpirun, with a terminal on which somebody types."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from hpc_train.launch.debug_terminal import DebugTerminal
from tests.faults.plan import VARIABLE, FaultPlan
from tests.launch.configs import write_training_config
from tests.launch.test_exec_mpi import ROOT, environment

pytestmark = pytest.mark.mpi

CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """A command with a terminal of its own."""

    def __init__(self, command: list[str], env: dict[str, str], folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        # In a session of its own, whose terminal this becomes: Ctrl-C is then a signal.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *command], env=env, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self.seen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave nothing behind, whatever a test did not come to."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=30)
        os.close(self._ours)

    def wait_for(self, what: str | Callable[[], bool], limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        begin = len(self.seen)
        while not (what in self.seen[begin:] if isinstance(what, str) else what()):
            assert time.monotonic() < deadline, f"waited for {what}: {self.seen}"
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self._ours, 4096).decode(errors="replace")
                except OSError:
                    return

    def type(self, data: bytes) -> None:
        os.write(self._ours, data)

    def end(self) -> int:
        self.wait_for(lambda: self.process.poll() is not None)
        return self.process.wait()


def test_ctrl_c_breaks_into_a_rank_that_hangs_and_what_is_typed_there_sets_it_free(tmp_path: Path) -> None:
    plan = FaultPlan().hang(rank=1, step=2).environment()
    config = write_training_config(tmp_path, launch={"env": {VARIABLE: plan[VARIABLE]}, "timeout_s": 600})
    command = [sys.executable, "-m", "hpc_train", "run", str(config), "-n", "2", "--run-dir", str(tmp_path / "run")]
    env = environment(OMP_NUM_THREADS="1", PYTHONPATH=f"{plan['PYTHONPATH']}:{ROOT}")
    with Terminal([*command, "--debug-rank", "1"], env, tmp_path) as terminal:
        terminal.wait_for("(rank 1) ")
        terminal.type(b"c\n")
        metrics = tmp_path / "run/metrics.jsonl"
        terminal.wait_for(lambda: metrics.exists() and bool(metrics.read_text()))
        stacks = [sys.executable, "-m", "hpc_train", "stacks", str(tmp_path / "run"), "--rank", "1", "--frames", "2"]
        shown = ""
        deadline = time.monotonic() + 60
        while "1 rank: 1\n    _hang  " not in shown:
            assert time.monotonic() < deadline, shown + terminal.seen
            shown = subprocess.run(stacks, env=env, capture_output=True, text=True, timeout=60).stdout
        terminal.type(CTRL_C)
        terminal.wait_for("(rank 1) ")
        terminal.type(b"up\n")
        terminal.wait_for("(rank 1) ")
        terminal.type(CTRL_C)
        terminal.wait_for("c goes on, q ends the run")
        terminal.type(b"(run.run_dir / 'go_on').touch()\n")
        terminal.wait_for("(rank 1) ")
        terminal.type(CTRL_D)
        terminal.wait_for("goes on without a debugger")
        assert terminal.end() == 0, terminal.seen
        assert "all ranks ended well" in terminal.seen
        assert "HPC_TRAIN_DEBUG" not in "".join(path.read_text() for path in (tmp_path / "run").glob("*.*"))


def test_a_rank_that_there_will_not_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = write_training_config(tmp_path)
    command = [sys.executable, "-m", "hpc_train", "run", str(config), "-n", "2", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [*command, "--debug-rank", "2"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 2
    assert "--debug-rank 2 is not among the 2 ranks, which are 0 to 1" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_terminal_to_which_no_rank_comes_takes_no_ctrl_c_and_ends() -> None:
    with DebugTerminal(0, "127.0.0.1") as terminal:
        assert not terminal.interrupt()

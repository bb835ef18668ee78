"""Whole runs with the node agent as their reader: killed whole, the agent killed, and compared with ranks that read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.faults.plan import FaultPlan
from tests.ranks import mpi_environment
from tests.train.runs import hpc_train, metrics, write_config, write_corpus

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

# What Open MPI and its launcher leave after SIGKILL; see docs/failure-model.md.
_OF_MPI = re.compile(r"(sm_segment|vader_segment|osc_rdma|ompi|prte|prrte|pmix|openmpi|shared_mem)[._-].*")
_SHARED = Path("/dev/shm")


def _left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not _OF_MPI.fullmatch(path.name)}


def _shared_files() -> set[str]:
    """Names in shared memory that no living process has open: those of other tests that run beside this one are."""
    left = _left_in(_SHARED)
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            used = [os.readlink(entry) for entry in (path / "fd").iterdir()]
            left -= {Path(name).name for name in used if name.startswith(f"{_SHARED}/")}
            left -= {name for name in left if f"{_SHARED}/{name}" in (path / "maps").read_text()}
    return left


def _sockets(secret: str) -> set[str]:
    """Addresses of agents of a start of a run."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    names = {line.split()[-1] for line in lines}
    return {name for name in names if name.startswith("@hpc_train.") and secret in name}


def _processes(run_dir: Path) -> list[int]:
    """Everything that was started for a run, by its environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"HPC_TRAIN_RUN_DIR={run_dir}".encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def _segments(pids: Iterable[int]) -> set[int]:
    """Inodes of all segments of ours that these processes have open or mapped."""
    found = set()
    for path in (Path(f"/proc/{pid}") for pid in pids):
        try:
            found |= {fd.stat().st_ino for fd in (path / "fd").iterdir() if "memfd:hpc_train." in os.readlink(fd)}
            maps = (path / "maps").read_text().splitlines()
            found |= {int(line.split()[4]) for line in maps if "memfd:hpc_train." in line}
        except OSError:
            continue
    return found


def _wait_until(condition: Callable[[], bool], limit_s: float = 200.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def _num_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def _agent_pid(run_dir: Path) -> int:
    log = next(run_dir.glob("logs/agent-*.log")).read_text()
    return int(re.findall(r"is ready, process (\d+)", log)[-1])


def test_a_run_killed_whole_leaves_nothing_goes_on_without_its_agent_and_ends_as_one_that_had_none(
    tmp_path: Path,
) -> None:
    """FC-86, FC-39. Killed by SIGKILL: the first time driver, ranks and agent; the second time the agent alone."""
    write_corpus(tmp_path / "corpus")
    write_config(tmp_path, steps=150)
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "hpc_train", "run", str(tmp_path / "config.yaml"), "-n", "2"]
    command += ["--run-dir", str(run_dir), "train.eval_every=50", "checkpoint.every=10", "checkpoint.keep=2"]
    command += ["launch.timeout_s=600"]
    before = _left_in(_SHARED)
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    # It does not come to its end before what is to be killed is killed.
    faults = FaultPlan().hang(rank=0, step=140).environment()

    def start() -> subprocess.Popen[str]:
        env = mpi_environment({"TMPDIR": str(temporary), **faults})
        return subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
        )

    driver = start()
    _wait_until(lambda: _num_steps(run_dir) >= 25)
    secret = json.loads((run_dir / "owner.json").read_text())["secret"]
    held = _segments(_processes(run_dir))
    assert len(_sockets(secret)) == 1 and held
    for pid in (driver.pid, *_processes(run_dir)):
        os.kill(pid, signal.SIGKILL)
    said = driver.communicate()[0]
    assert "data: read once a node by its agent" in said
    _wait_until(lambda: not _processes(run_dir))
    _wait_until(lambda: _shared_files() <= before, 60.0)
    assert _left_in(temporary) <= {f"hpc_train-{os.getuid()}"}  # caches of compiled code, kept on purpose
    # What is killed loses its environment before its open files.
    _wait_until(lambda: not _sockets(secret), 60.0)
    _wait_until(lambda: not held & _segments(int(path.name) for path in Path("/proc").glob("[0-9]*")), 60.0)

    driver = start()
    _wait_until(lambda: _num_steps(run_dir) >= 60)
    os.kill(_agent_pid(run_dir), signal.SIGKILL)
    (run_dir / "go_on").touch()
    said = driver.communicate(timeout=200)[0]
    assert driver.returncode == 0, said
    assert "resumed from" in said
    assert said.count("from here on the ranks of this node read by themselves (data.reader=auto)") == 1

    plain = hpc_train([*command[3:], "data.reader=rank", "--run-dir", tmp_path / "plain"], cwd=tmp_path, timeout_s=200)
    assert plain.returncode == 0, plain.stdout + plain.stderr
    assert "each rank reads by itself, a step ahead (data.reader=rank)" in plain.stdout
    assert metrics(run_dir) == metrics(tmp_path / "plain")


@pytest.mark.long
def test_a_rank_that_dies_behind_a_copy_does_not_take_the_save_with_it(tmp_path: Path) -> None:
    """The save of step 4 would take some seconds; rank 1 is killed at step 5, and the agent hurries to its end."""
    write_corpus(tmp_path / "corpus")
    write_config(tmp_path, steps=8)
    words = ["run", tmp_path / "config.yaml", "-n", 2, "--run-dir", tmp_path / "run", "checkpoint.every=4"]
    slow = [*words, "checkpoint.write_bytes_per_s=50000"]
    died = hpc_train(slow, env=FaultPlan().kill(rank=1, step=5).environment(), timeout_s=200)
    assert died.returncode not in (0, 10), died.stdout + died.stderr
    assert "step 4 is copied in" in died.stdout and "saved step_0000004" not in died.stdout
    (agent_log,) = (tmp_path / "run/logs").glob("agent-*.log")
    assert "checkpoint: step 4 is written to its end first" in agent_log.read_text()
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step_0000004\n"
    again = hpc_train(words, timeout_s=200)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "step_0000004 at step 4" in again.stdout
    plain = hpc_train([*words[:5], tmp_path / "plain", *words[6:], "checkpoint.writer=rank"], timeout_s=200)
    assert plain.returncode == 0, plain.stdout + plain.stderr
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")

"""Stopping a run on one machine, with a save: by a signal to the driver, or by a time limit without any."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_train.checkpoint.folders.attempt import begin_attempt, require_attempt
from hpc_train.checkpoint.stores.location import locate
from hpc_train.cluster.agent_address import ask_agent, this_node
from hpc_train.errors import ExitCode
from hpc_train.launch.run_folder import read_owner
from tests.faults.plan import FaultPlan
from tests.processes import kill_tree
from tests.ranks import mpi_environment
from tests.train.forked_runs import train_forked
from tests.train.runs import last_step, metrics, write_config, write_corpus

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

STEPS = 60
SLOW = FaultPlan().slow(200)
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus")
    write_config(tmp_path, steps=STEPS, eval_every=10)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts the run with further words; what a test leaves of it when it fails is ended."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str, faults: FaultPlan = SLOW) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "hpc_train", "run", str(folder / "config.yaml"), "-n", "2"]
        with (folder / "run.out").open("w") as out:
            process = subprocess.Popen(
                [*command, "--run-dir", str(folder / "run"), *words],
                env=mpi_environment(faults.environment()),
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            kill_tree(process.pid)
            process.wait()


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while last_step(run_dir) < step:
        assert process.poll() is None, f"ended with {process.returncode} before step {step}"
        assert time.monotonic() < deadline, f"no step {step}"
        time.sleep(0.05)


def wait_for_line(path: Path, text: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while text not in path.read_text():
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < deadline, f"no line {text!r}"
        time.sleep(0.05)


def outcome(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "outcome.json").read_text())


def test_signals_to_the_driver_and_a_time_limit_save_the_step_end_with_10_and_the_run_goes_on_bit_for_bit(
    folder: Path, start: Start
) -> None:
    """Three times in a row: TERM, USR2, and a time limit, which stops the run in good time without a signal."""
    run, taken = folder / "run", 0
    for number in (signal.SIGTERM, signal.SIGUSR2):
        process = start()
        wait_for_step(run, taken + 5, process)
        process.send_signal(number)
        taken = _check_saved(folder, process, taken, "SIGUSR2 on 2 of 2 ranks")
    begin = time.time()
    process = start("--time", "0:20", faults=FaultPlan().slow(1000))
    last = _check_saved(folder, process, taken, "the time limit")
    assert (run / "checkpoints/latest").stat().st_mtime < begin + 20 or last == taken + 1
    assert train_forked(folder, "run", 2) == train_forked(folder, "alone", 2)
    outcomes = [json.loads((run / name).read_text()) for name in ("outcome-1.json", "outcome-2.json", "outcome.json")]
    assert [outcome["exit_code"] for outcome in outcomes] == [ExitCode.REQUEUE] * 3


def _check_saved(folder: Path, process: subprocess.Popen[str], first: int, reason: str) -> int:
    """The step behind `first` at which it was stopped, which is saved; and that is what the records say."""
    run = folder / "run"
    assert process.wait(240) == ExitCode.REQUEUE, (folder / "run.out").read_text()
    record = outcome(run)
    taken = int(str(metrics(run)[-1]["step"]))
    assert first < taken < STEPS
    assert (record["outcome"], record["exit_code"]) == ("interrupted", 10)
    assert record["reason"] == f"stopped after step {taken}, which is saved: {reason}"
    assert (run / "checkpoints/latest").read_text() == f"step_{taken:07d}\n"
    if first:
        log = (run / "logs" / f"{os.uname().nodename}.log").read_text()
        assert f"step_{first:07d} at step {first}" in log
    return taken


def test_ctrl_c_ends_the_run_at_once_where_signals_that_slurm_repeats_wait_for_the_save(
    folder: Path, start: Start
) -> None:
    process = start("launch.timeout_s=600", faults=FaultPlan().hang(rank=1, step=4))
    wait_for_step(folder / "run", 3, process)
    for _ in range(2):
        process.terminate()
        time.sleep(0.5)
    assert process.poll() is None, "it waits for the step's end, which does not come"
    process.send_signal(signal.SIGINT)
    assert process.wait(240) == ExitCode.INTERNAL  # before rank 0 has waited for launch.timeout_s
    assert outcome(folder / "run")["outcome"] == "stopped"


def test_ranks_whose_folder_a_later_start_has_taken_save_nothing_more_and_say_so(folder: Path, start: Start) -> None:
    """Ranks that write by themselves; of node agents, see `test_node_writer`."""
    checkpoints = folder / "run" / "checkpoints"
    process = start("checkpoint.writer=rank", "checkpoint.keep=2")
    wait_for_line(folder / "run.out", "saved step_0000002", process)
    begin_attempt(locate(checkpoints), "a later start")
    there = sorted(path.name for path in checkpoints.glob("step_*"))
    assert process.wait(240) == ExitCode.CHECKPOINT, (folder / "run.out").read_text()
    told = f"another start of the run writes to {checkpoints} now, and its checkpoints are left to it"
    assert told in str(outcome(folder / "run")["reason"])
    # One save may have looked before.
    assert len(set(there) ^ {path.name for path in checkpoints.glob("step_*")}) <= 1
    require_attempt(locate(checkpoints), "a later start")


@pytest.mark.long
def test_ranks_that_are_killed_before_they_could_save_were_interrupted_and_have_not_failed(
    folder: Path, start: Start
) -> None:
    """The warning ends while agents still write the save before; one rank is killed a moment before the other."""
    slow = ["checkpoint.every=4", "checkpoint.write_bytes_per_s=1000", "checkpoint.finish_s=0"]
    process = start(*slow)
    wait_for_step(folder / "run", 5, process)
    owner = read_owner(folder / "run")
    assert owner is not None
    process.terminate()
    wait_for_line(folder / "run.out", "the save of step 4 is not done", process)
    status = ask_agent(owner.job_key, this_node({}), {"say": "status"})
    assert status is not None
    os.kill(next(entry["pid"] for entry in status["ranks"] if entry["rank"] == 1), signal.SIGKILL)
    assert process.wait(60) == ExitCode.REQUEUE, (folder / "run.out").read_text()
    record = outcome(folder / "run")
    assert (record["outcome"], record["exit_code"]) == ("interrupted", 10)
    told = "the driver got SIGTERM; the ranks ended before all had left in good order (first rank 1 "
    assert str(record["reason"]).startswith(told)
    assert not (folder / "run/failure.json").exists()


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system for the checkpoints, with a way to fill it up."""
    path = folder / "run/checkpoints"
    path.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_is_full_when_the_run_must_stop_loses_nothing_that_was_saved(
    folder: Path, small_disk: Path, start: Start
) -> None:
    """FC-64: the warning has come, the save fails: the last complete checkpoint stands, and the code says why."""
    # A save of step 8 that pushed that of step 4 aside would make room for the last one.
    words = ["checkpoint.every=4", "checkpoint.keep=1", "launch.timeout_s=600"]
    process = start(*words, faults=SLOW.hang(rank=1, step=6))
    wait_for_step(folder / "run", 4, process)
    deadline = time.monotonic() + 60
    while not (small_disk / "latest").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (small_disk / "other").write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize))
    process.terminate()
    (folder / "run/go_on").touch()
    assert process.wait(100) == ExitCode.CHECKPOINT, (folder / "run.out").read_text()
    complete = sorted(path.name for path in small_disk.glob("step_*"))
    assert complete
    assert (small_disk / "latest").read_text().strip() in complete
    (small_disk / "other").unlink()
    train_forked(folder, "run", 2, "train.steps=12")
    assert f"resumed from {small_disk}/step_" in (folder / "run/logs/forked.log").read_text()

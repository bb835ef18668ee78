"""When a run stops before its last step."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_train.comm.control import SingleControl
from hpc_train.config import CheckpointConfig, OptimizerConfig
from hpc_train.train import loop
from hpc_train.train.loop import Run, Stopped
from hpc_train.train.step import StepResult
from hpc_train.train.stop import StopMark, describe_reasons


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_nothing_stops_a_run_without_a_signal_and_without_a_limit() -> None:
    mark = StopMark((signal.SIGUSR2,))
    mark.install()
    mark.completed_step(1e9)
    assert not mark.wanted()
    assert mark.reason is None


def test_a_signal_is_a_mark_that_stays() -> None:
    mark = StopMark((signal.SIGTERM, signal.SIGUSR2))
    mark.install()
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert mark.wanted()
    assert mark.wanted()
    assert mark.reason == "SIGUSR2"


def test_before_the_limit_there_is_time_for_one_more_step_and_a_save() -> None:
    clock = Clock()
    mark = StopMark(end_time=2000.0, clock=clock)
    mark.completed_step(20.0)
    assert mark.completed_save(40.0) is None
    clock.now = 2000.0 - mark.reserve_s() - 1.0
    assert not mark.wanted()
    assert 2000.0 - clock.now > 20.0 + 40.0
    clock.now += 2.0
    assert mark.wanted()
    assert mark.reason == "the time limit"


def test_before_the_limit_there_is_time_for_the_save_that_the_last_one_waits_for() -> None:
    clock = Clock()
    mark = StopMark(end_time=2000.0, clock=clock)
    mark.completed_step(20.0)
    mark.completed_save(40.0)
    clock.now = 2000.0 - mark.reserve_s() - 1.0
    assert mark.wanted(is_saving=True) and 2000.0 - clock.now < 20.0 + 2 * 1.5 * 40.0
    mark = StopMark(end_time=2000.0, clock=clock)
    mark.completed_step(20.0)
    mark.completed_save(40.0)
    clock.now = 2000.0 - mark.reserve_s(is_saving=True) - 1.0
    assert not mark.wanted(is_saving=True) and 2000.0 - clock.now > 20.0 + 2 * 40.0


def test_a_run_of_one_minute_is_not_used_up_by_the_guess_of_a_save() -> None:
    clock = Clock()
    mark = StopMark(end_time=1060.0, clock=clock)
    mark.completed_step(0.5)
    assert mark.reserve_s() < 25.0
    mark = StopMark(end_time=1000.0 + 86400.0, clock=clock)
    mark.completed_step(0.5)
    assert mark.reserve_s() > 60.0


def test_a_limit_that_has_passed_already_stops_after_one_step() -> None:
    clock = Clock()
    assert StopMark(end_time=990.0, clock=clock).wanted()


def test_a_warning_time_shorter_than_a_step_and_a_save_is_said_once() -> None:
    mark = StopMark(end_time=2000.0, stop_before_s=30.0, clock=Clock())
    mark.completed_step(5.0)
    assert mark.reserve_s() == 30.0
    assert mark.completed_save(20.0) is None
    said = mark.completed_save(26.0)
    assert said is not None
    assert said.startswith("launch.stop_before_s (30 s): shorter than a step and a save (5.0 s and 26.0 s)")
    assert mark.completed_save(27.0) is None


def test_warnings_of_slurm_that_are_too_short_are_said() -> None:
    mark = StopMark()
    mark.set_limit(None, None, {"--signal=USR2@5": 5.0, "a preemption in partition low (GraceTime)": 60.0})
    said = mark.completed_save(8.0)
    assert said is not None
    assert said.startswith("--signal=USR2@5 (5 s): shorter than a step and a save (0.0 s and 8.0 s)")
    assert "GraceTime" not in said
    assert "GraceTime" in str(mark.completed_save(61.0))


def test_a_handler_that_was_replaced_is_named() -> None:
    """FC-32: in Python, or behind Python's back as NCCL does."""
    mark = StopMark((signal.SIGUSR1, signal.SIGUSR2))
    mark.install()
    assert mark.replaced() == []
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert mark.replaced() == ["SIGUSR1"]
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGUSR2, ctypes.cast(libc.getpid, ctypes.c_void_p))
    assert mark.replaced() == ["SIGUSR1", "SIGUSR2"]


def test_reasons_of_all_ranks_in_one_line() -> None:
    assert describe_reasons(["SIGTERM", None, "SIGTERM", None]) == "SIGTERM on 2 of 4 ranks"
    assert describe_reasons(["the time limit", None, "SIGUSR2", None]) == "SIGUSR2 on 1 of 4 ranks and the time limit"


class FakeTrainer:
    """A step that takes some time, in which the signal may come anywhere."""

    def __init__(self) -> None:
        self.inside = False

    def step(self, number: int, micro_batches: Any, lr: float, stop_wanted: Any, next_plan: None) -> StepResult:
        self.inside = True
        deadline = time.perf_counter() + 0.0005
        while time.perf_counter() < deadline:
            pass
        wanted = stop_wanted()
        self.inside = False
        return StepResult(1.0, 1.0, 8, 8, False, wanted)


def _fake_run(folder: Path, steps: int, saved: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch) -> Run:
    config = SimpleNamespace(
        train=SimpleNamespace(steps=steps, eval_every=0, max_skipped_steps=3, gc_every=1000),
        data=SimpleNamespace(seq_len=8),
        parallel=SimpleNamespace(hdp=None),
        checkpoint=CheckpointConfig(),
        optimizer=OptimizerConfig(lr=1.0),
        model=None,
    )
    trainer = FakeTrainer()

    def save(run: Run, *, must_last: bool) -> bool:
        assert must_last
        time.sleep(0.0003)
        saved.append((run.step, trainer.inside))
        return True

    monkeypatch.setattr(loop, "save", save)
    monkeypatch.setattr(loop, "state_pieces", lambda trainer, counted: [])
    monkeypatch.setattr(
        loop, "_collection_at_fixed_steps", contextlib.nullcontext
    )  # 0.3 s a run, which nobody asks for
    monkeypatch.setattr(loop, "_record", lambda run, result, lr, seconds: {})
    world = SimpleNamespace(control=SingleControl(), rank=0)
    feed = SimpleNamespace(micro_batches=lambda step: ())
    return Run(config, world, folder, trainer, feed, None, 1.0)  # type: ignore[arg-type]


def test_signals_at_random_moments_give_one_complete_save_each_at_a_step_border(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FC-29: 200 runs; the signal comes in a step, in a save, or between them."""
    moments = random.Random(5)
    for number in range(200):
        saved: list[tuple[int, bool]] = []
        run = _fake_run(tmp_path, 10_000, saved, monkeypatch)
        run.stop = StopMark((signal.SIGUSR2,))
        run.stop.install()
        timer = threading.Timer(moments.uniform(0.0, 0.01), os.kill, (os.getpid(), signal.SIGUSR2))
        timer.start()
        stopped = loop.train(run)
        timer.join()
        assert stopped == Stopped(run.step, "SIGUSR2 on 1 of 1 ranks", True), number
        assert saved == [(run.step, False)], number


def test_a_stop_wish_in_the_last_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[tuple[int, bool]] = []
    run = _fake_run(tmp_path, 1, saved, monkeypatch)
    run.stop = StopMark(end_time=0.0)
    assert loop.train(run) is None
    assert saved == [(1, False)]


def test_a_replaced_handler_is_warned_of_at_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FC-32"""
    run = _fake_run(tmp_path, 2, [], monkeypatch)
    run.stop = StopMark((signal.SIGUSR2,))
    run.stop.install()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    loop.train(run)
    assert "SIGUSR2 is handled by another library on 1 ranks" in capsys.readouterr().err

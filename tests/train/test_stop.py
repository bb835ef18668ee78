"""When a run stops before its last step."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.train import loop
from hpc_train.train.loop import Ended
from hpc_train.train.stop import StopMark, describe_reasons
from tests.train.fake_runs import FakeTrainer, fake_run


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


def test_signals_at_random_moments_give_one_complete_save_each_at_a_step_border(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FC-29: 200 runs; the signal comes in a step, in a save, or between them."""
    moments = random.Random(5)
    for number in range(200):
        fake = fake_run(tmp_path, monkeypatch, steps=10_000, trainer=FakeTrainer(step_s=0.0005), save_s=0.0003)
        run = fake.run
        run.stop = StopMark((signal.SIGUSR2,))
        run.stop.install()
        timer = threading.Timer(moments.uniform(0.0, 0.01), os.kill, (os.getpid(), signal.SIGUSR2))
        timer.start()
        ended = loop.train(run)
        timer.join()
        assert ended == Ended(run.step, "SIGUSR2 on 1 of 1 ranks", True, None), number
        assert fake.saved == [(run.step, True)] and fake.trainer.is_finished, number


def test_a_stop_wish_in_the_last_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_run(tmp_path, monkeypatch, steps=1)
    fake.run.stop = StopMark(end_time=0.0)
    assert loop.train(fake.run) == Ended(1, None, True, None)
    assert fake.saved == [(1, True)]


def test_a_replaced_handler_is_warned_of_at_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FC-32"""
    run = fake_run(tmp_path, monkeypatch, steps=2).run
    run.stop = StopMark((signal.SIGUSR2,))
    run.stop.install()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    loop.train(run)
    assert "SIGUSR2 is handled by another library on 1 ranks" in capsys.readouterr().err

"""What a run says at its end of saves that failed, where checkpoint.on_error=continue."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.errors import CheckpointError, ExitCode
from hpc_train.launch.ranks import RanksEnd
from hpc_train.launch.record import decide_outcome
from hpc_train.train import loop, main
from hpc_train.train.stop import StopMark
from tests.train.fake_runs import fake_run

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    ("refused", "found", "words"),
    [
        ((4, 6), None, "2 saves failed, and step_0000002 was saved last; the last that failed is that of step 6: the "),
        ((2, 4, 6), None, "3 saves failed, and nothing was saved; "),
        ((2, 4, 6), 1, "3 saves failed, and nothing since the start, so step_0000001 is still the newest; "),
    ],
)
def test_a_run_that_has_lost_its_last_save_is_not_done(
    tmp_path: Path, monkeypatch: Patch, refused: tuple[int, ...], found: int | None, words: str
) -> None:
    run = fake_run(tmp_path, monkeypatch, steps=6, every=2, refused=refused).run
    run.saver.loaded(found)
    with pytest.raises(CheckpointError) as raised:
        loop.train(run)
    assert (run.step, raised.value.exit_code, raised.value.reporter) == (6, ExitCode.CHECKPOINT, 0)
    assert words in str(raised.value) and "the store is read-only. When that is mended" in str(raised.value)


def test_a_run_that_is_done_tells_of_saves_that_it_went_on_without(tmp_path: Path, monkeypatch: Patch) -> None:
    ended = loop.train(fake_run(tmp_path, monkeypatch, steps=6, every=2, refused=(2, 4)).run)
    assert main._write_outcome(tmp_path, ended) == ExitCode.DONE
    outcome = decide_outcome(tmp_path, RanksEnd(0))
    assert (outcome.outcome, outcome.exit_code) == ("done", 0)
    assert outcome.reason == (
        "all ranks ended well; 2 saves failed, and step_0000006 was saved last; the last that failed is that of step "
        "4: the store is read-only"
    )
    assert decide_outcome(tmp_path, RanksEnd(139)).exit_code == ExitCode.INTERNAL


def test_a_run_that_stops_without_its_save_comes_back_and_says_why(tmp_path: Path, monkeypatch: Patch) -> None:
    run = fake_run(tmp_path, monkeypatch, steps=6, refused=(1,)).run
    run.stop = StopMark(end_time=0.0)
    assert main._write_outcome(tmp_path, loop.train(run)) == ExitCode.DONE
    outcome = decide_outcome(tmp_path, RanksEnd(0))
    assert (outcome.outcome, outcome.exit_code) == ("interrupted", ExitCode.REQUEUE)
    begin = "stopped after step 1, which is not saved, so that the last complete checkpoint stands: the time limit"
    assert outcome.reason.startswith(f"{begin}; 1 save failed, and nothing was saved; the last that failed is that of ")

"""The loop where ranks share sequences: plans are compared before anyone waits in their rings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_train.comm.control import Compared, SingleControl
from hpc_train.data.batch_source import HeldoutPart
from hpc_train.errors import DataError, HpcTrainError, LaunchError
from hpc_train.train import loop
from tests.train.fake_runs import FakeRun, FakeTrainer, fake_run

DIGESTS = [bytes([number] * 8) for number in range(3)]


class OtherRank(SingleControl):
    """A channel to one other rank, which compares these values in their turn."""

    def __init__(self, values: Sequence[str]) -> None:
        self.values = list(values)

    def compare(self, value: str, note: str, timeout_s: float | None = None) -> Compared:
        return Compared(note, int(value != self.values.pop(0)))


def run_beside(other: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch, same_until: int = 9) -> FakeRun:
    """A run of four steps, evaluated and saved at every second, beside a rank that compares these values."""
    parts = [HeldoutPart([f"part {digest[0]}"], digest) for digest in DIGESTS]  # type: ignore[list-item]
    trainer = FakeTrainer(same_until=same_until)
    return fake_run(folder, monkeypatch, steps=4, every=2, trainer=trainer, control=OtherRank(other), heldout=parts)


ALIKE = [*(digest.hex() for digest in DIGESTS), "the end"]


def test_held_out_steps_that_all_ranks_planned_alike_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = run_beside(["", *ALIKE, *ALIKE], tmp_path, monkeypatch)
    assert loop.train(fake.run).stopped_by is None
    assert fake.trainer.evaluated == 2 * ["part 0", "part 1", "part 2"]
    assert fake.records[1] == {"step": 2, "eval_loss": 2.0} and fake.saved == [(2, False), (4, True)]
    assert fake.trainer.is_finished


@pytest.mark.parametrize("theirs", ["0909090909090909", "the end"])
def test_a_held_out_step_that_ranks_planned_differently_is_refused_before_its_rings(
    theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = run_beside(["", ALIKE[0], theirs], tmp_path, monkeypatch)
    with pytest.raises(LaunchError, match="ranks planned held-out step 1 differently") as caught:
        loop.train(fake.run)
    assert fake.trainer.evaluated == ["part 0"]
    assert caught.value.reporter == 0


def test_where_the_next_plans_differ_nothing_is_evaluated_and_what_was_trained_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out steps would be planned differently too."""
    fake = run_beside([""], tmp_path, monkeypatch, same_until=1)
    with pytest.raises(LaunchError, match="ranks planned step 3 differently") as caught:
        loop.train(fake.run)
    assert fake.trainer.evaluated == [] and fake.records[-1] == {"step": 2} and fake.saved == [(2, False)]
    assert caught.value.reporter == 0, "all ranks raise alike, and one says it"


def test_a_first_plan_that_differs_is_refused_before_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = run_beside(["07"], tmp_path, monkeypatch)
    with pytest.raises(LaunchError, match="ranks planned step 1 differently") as caught:
        loop.train(fake.run)
    assert fake.records == [] and caught.value.reporter == 0


@pytest.mark.parametrize(("steps", "taken"), [(2, 2), (9, 3)])
def test_a_run_that_trains_on_nothing_ends_with_an_error_of_its_data(
    steps: int, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end, or after train.max_skipped_steps, which are 3 here."""
    fake = fake_run(tmp_path, monkeypatch, steps=steps, trainer=FakeTrainer(supervised=0))
    with pytest.raises(DataError, match=f"{taken} steps in a row up to step {taken} had no supervised token") as caught:
        loop.train(fake.run)
    assert len(fake.records) == taken and caught.value.reporter == 0
    assert fake.saved == [(2, True)] * (steps == taken)


def test_a_start_behind_the_last_step_does_not_say_why_the_one_before_skipped_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have had no finite numbers: what this start has not seen is not put down to the data."""
    fake = fake_run(tmp_path, monkeypatch, steps=3)
    fake.run.step = fake.run.skipped_steps = 3
    with pytest.raises(HpcTrainError, match="no finite loss and gradient norm, or no supervised token") as caught:
        loop.train(fake.run)
    assert caught.value.exit_code == 1 and fake.records == []

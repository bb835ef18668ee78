"""The loop where ranks share sequences: plans are compared before anyone waits in their rings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_train.comm.control import Compared, SingleControl
from hpc_train.config import CheckpointConfig, HdpConfig, OptimizerConfig
from hpc_train.data.batch_source import HeldoutPart
from hpc_train.errors import LaunchError
from hpc_train.train import loop
from hpc_train.train.loop import Run
from hpc_train.train.step import StepResult

DIGESTS = [bytes([number] * 8) for number in range(3)]


class OtherRank(SingleControl):
    """A channel to one other rank, which compares these values in their turn."""

    def __init__(self, values: Sequence[str]) -> None:
        self.values = list(values)

    def compare(self, value: str, note: str, timeout_s: float | None = None) -> Compared:
        return Compared(note, int(value != self.values.pop(0)))


class FakeTrainer:
    """Notes what it is given. same_until: the last step with whose end all ranks have the same next plan."""

    def __init__(self, same_until: int) -> None:
        self.same_until = same_until
        self.evaluated: list[Any] = []

    def step(self, number: int, micro_batches: Any, lr: float, stop_wanted: Any, next_plan: Any) -> StepResult:
        return StepResult(1.0, 1.0, 8, 8, False, has_same_plan=number <= self.same_until)

    def evaluate(self, steps: Iterable[Any]) -> float:
        for batches in steps:
            self.evaluated += batches
        return 2.0


def run_beside(
    other: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch, same_until: int = 9
) -> tuple[Run, list[dict[str, Any]], list[int]]:
    """A run of four steps, evaluated and saved at every second; its records; steps that were saved."""
    records: list[dict[str, Any]] = []
    saved: list[int] = []

    def save(run: Run, *, must_last: bool) -> bool:
        saved.append(run.step)
        return True

    monkeypatch.setattr(loop, "save", save)
    monkeypatch.setattr(loop, "state_pieces", lambda trainer, counted: [])
    monkeypatch.setattr(loop, "_collection_at_fixed_steps", contextlib.nullcontext)
    monkeypatch.setattr(loop, "_record", lambda run, result, lr, seconds: {"step": run.step})
    config = SimpleNamespace(
        train=SimpleNamespace(steps=4, eval_every=2, max_skipped_steps=3, gc_every=1000),
        data=SimpleNamespace(seq_len=8),
        parallel=SimpleNamespace(hdp=HdpConfig(capacity_tokens=128)),
        checkpoint=CheckpointConfig(every=2),
        optimizer=OptimizerConfig(lr=1.0),
        model=None,
    )
    feed = SimpleNamespace(
        micro_batches=lambda step: (),
        plan_ahead=lambda step: b"",
        heldout=lambda: iter([HeldoutPart([f"part {digest[0]}"], digest) for digest in DIGESTS]),  # type: ignore[list-item]
    )
    world = SimpleNamespace(control=OtherRank(other), rank=0)
    metrics = SimpleNamespace(write=records.append)
    return Run(config, world, folder, FakeTrainer(same_until), feed, metrics, 1.0), records, saved  # type: ignore[arg-type]


ALIKE = [*(digest.hex() for digest in DIGESTS), "the end"]


def test_held_out_steps_that_all_ranks_planned_alike_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, records, saved = run_beside(["", *ALIKE, *ALIKE], tmp_path, monkeypatch)
    assert loop.train(run) is None
    assert run.trainer.evaluated == 2 * ["part 0", "part 1", "part 2"]  # type: ignore[attr-defined]
    assert records[1] == {"step": 2, "eval_loss": 2.0} and saved == [2, 4]


@pytest.mark.parametrize("theirs", ["0909090909090909", "the end"])
def test_a_held_out_step_that_ranks_planned_differently_is_refused_before_its_rings(
    theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, _ = run_beside(["", ALIKE[0], theirs], tmp_path, monkeypatch)
    with pytest.raises(LaunchError, match="ranks planned held-out step 1 differently") as caught:
        loop.train(run)
    assert run.trainer.evaluated == ["part 0"]  # type: ignore[attr-defined]
    assert caught.value.reporter == 0


def test_where_the_next_plans_differ_nothing_is_evaluated_and_what_was_trained_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out steps would be planned differently too."""
    run, records, saved = run_beside([""], tmp_path, monkeypatch, same_until=1)
    with pytest.raises(LaunchError, match="ranks planned step 3 differently") as caught:
        loop.train(run)
    assert run.trainer.evaluated == [] and records[-1] == {"step": 2} and saved == [2]  # type: ignore[attr-defined]
    assert caught.value.reporter == 0, "all ranks raise alike, and one says it"


def test_a_first_plan_that_differs_is_refused_before_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, records, _ = run_beside(["07"], tmp_path, monkeypatch)
    with pytest.raises(LaunchError, match="ranks planned step 1 differently") as caught:
        loop.train(run)
    assert records == [] and caught.value.reporter == 0

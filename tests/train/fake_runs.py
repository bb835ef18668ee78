"""A run without ranks, model or data, for tests of the loop: its steps and saves only note that they were taken."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_train.checkpoint.saving import saver as saver_module
from hpc_train.comm.control import Control, SingleControl
from hpc_train.config import CheckpointConfig, HdpConfig, LaunchConfig, OptimizerConfig
from hpc_train.data.batch_source import HeldoutPart
from hpc_train.errors import CheckpointError
from hpc_train.train import loop
from hpc_train.train.loop import Run
from hpc_train.train.step import StepResult


@dataclass
class FakeTrainer:
    """Notes what it is given. step_s: of each step; same_until: the last with whose end all have the same next plan.

    supervised: tokens of each step.
    """

    step_s: float = 0.0
    same_until: int = 1_000_000
    supervised: int = 8
    is_inside: bool = False
    is_finished: bool = False
    evaluated: list[Any] = field(default_factory=list)

    def step(
        self, number: int, micro_batches: Any, lr: float, stop_wanted: Callable[[], bool], next_plan: Any
    ) -> StepResult:
        self.is_inside = True
        deadline = time.perf_counter() + self.step_s
        while time.perf_counter() < deadline:
            pass
        wanted = stop_wanted()
        self.is_inside = False
        loss = 1.0 if self.supervised else math.nan
        is_skipped = not self.supervised
        return StepResult(loss, loss, 8, self.supervised, is_skipped, wanted, has_same_plan=number <= self.same_until)

    def finish(self) -> None:
        self.is_finished = True

    def evaluate(self, steps: Iterable[Any]) -> float:
        for batches in steps:
            self.evaluated += batches
        return 2.0


@dataclass
class FakeRun:
    """A run, the records of its steps, and its saves: their step, and whether it was to last."""

    run: Run
    trainer: FakeTrainer
    records: list[dict[str, Any]] = field(default_factory=list)
    saved: list[tuple[int, bool]] = field(default_factory=list)


def fake_run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    steps: int,
    every: int = 0,
    trainer: FakeTrainer | None = None,
    control: Control | None = None,
    heldout: Sequence[HeldoutPart] = (),
    save_s: float = 0.0,
    refused: Collection[int] = (),
) -> FakeRun:
    """A run of rank 0, evaluated and saved `every` so many steps and at its end, with checkpoint.on_error=continue.

    heldout: makes it one of which ranks share sequences. control: to the other ranks. refused: by the store, steps.
    """
    config = SimpleNamespace(
        train=SimpleNamespace(steps=steps, eval_every=every if heldout else 0, max_skipped_steps=3, gc_every=1000),
        data=SimpleNamespace(seq_len=8),
        parallel=SimpleNamespace(hdp=HdpConfig(capacity_tokens=128) if heldout else None),
        checkpoint=CheckpointConfig(every=every, on_error="continue"),
        launch=LaunchConfig(),
        optimizer=OptimizerConfig(lr=1.0),
        model=None,
    )
    feed = SimpleNamespace(micro_batches=lambda step: (), plan_ahead=lambda step: b"", heldout=lambda: iter(heldout))
    world = SimpleNamespace(control=control or SingleControl(), rank=0, local_rank=0)
    trainer = trainer or FakeTrainer()
    metrics = SimpleNamespace(write=lambda record: fake.records.append(record))
    fake = FakeRun(Run(config, world, folder, trainer, feed, metrics, 1.0), trainer)  # type: ignore[arg-type]

    def save(run: Run, *, must_last: bool) -> bool:
        assert not trainer.is_inside, "in the middle of a step"
        time.sleep(save_s)
        fake.saved.append((run.step, must_last))
        return run.saver.save(run.step, [], {}, must_last=must_last)

    def save_checkpoint(root: Any, step: int, *args: Any, **more: Any) -> None:
        if step in refused:
            raise CheckpointError("the store is read-only")

    monkeypatch.setattr(saver_module, "save_checkpoint", save_checkpoint)
    monkeypatch.setattr(loop, "save", save)
    monkeypatch.setattr(loop, "state_pieces", lambda trainer, counted: [])
    # 0.3 s a run, which nobody asks for.
    monkeypatch.setattr(loop, "_collection_at_fixed_steps", contextlib.nullcontext)
    monkeypatch.setattr(loop, "_record", lambda run, result, lr, seconds: {"step": run.step})
    return fake

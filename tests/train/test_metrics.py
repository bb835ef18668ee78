"""Metrics are strict JSON, never end a run, and do not divide by a clock that stood still."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from hpc_train.train.metrics import Metrics, progress_line
from hpc_train.train.peak import world_peak_flops
from tests.worlds import single_world


def _record(step: int, **changes: object) -> dict:
    record = {"step": step, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "tokens": 10, "step_time_s": 0.5}
    return record | {"tokens_per_s": 20.0, "mfu": 0.1, "skipped": False} | changes


def _metrics(tmp_path: Path, **changes) -> Metrics:
    return Metrics(tmp_path, **{"tensorboard": False, "num_steps": 9, "log_every": 5} | changes)


def _strict(text: str) -> object:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_lines_are_strict_json_with_null_for_what_is_not_finite(tmp_path, capsys):
    metrics = _metrics(tmp_path)
    metrics.write(_record(1, loss=math.nan, grad_norm=math.inf, tokens_per_s=None, mfu=None, step_time_s=0.0))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = _strict(line)
    assert record["loss"] is None and record["grad_norm"] is None and record["tokens_per_s"] is None
    assert "loss n/a" in capsys.readouterr().out


def test_progress_is_said_at_the_first_last_and_every_nth_step_and_when_something_happened(tmp_path, capsys):
    metrics = _metrics(tmp_path)
    for step in range(1, 10):
        changes = {3: {"skipped": True}, 7: {"eval_loss": 1.5}}.get(step, {})
        metrics.write(_record(step, **changes))
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in said] == ["1/9", "3/9", "5/9", "7/9", "9/9"]
    assert "SKIPPED" in said[1]
    assert "held-out loss 1.5000" in said[3]


def test_steps_that_are_taken_again_stand_in_the_file_once(tmp_path):
    metrics = _metrics(tmp_path)
    for step in (1, 2, 3):
        metrics.write(_record(step))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    metrics.forget_after(2)
    metrics.write(_record(3, loss=9.0))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 2.0), (2, 2.0), (3, 9.0)]


def test_a_full_disk_does_not_end_the_run_and_is_said_once(tmp_path, capsys):
    metrics = _metrics(tmp_path / "gone")
    metrics.write(_record(1))
    metrics.write(_record(2))
    assert capsys.readouterr().out.count("cannot be written") == 1


def test_tensorboard_gets_the_same_figures(tmp_path):
    pytest.importorskip("tensorboard")
    metrics = _metrics(tmp_path, tensorboard=True)
    metrics.write(_record(1, eval_loss=1.5))
    metrics.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"loss", "grad_norm", "eval_loss"} <= set(events.Tags()["scalars"])
    assert events.Scalars("eval_loss")[0].value == 1.5


def test_a_cpu_has_no_peak_but_the_one_that_is_given():
    """What a product reaches on shared cores is what others leave at its moment; steps came to 380 % of it."""
    world = single_world()
    assert world_peak_flops(world, torch.float32, 2e9) == (2e9, "given by train.peak_flops_per_rank")
    peak, origin = world_peak_flops(world, torch.float32, None)
    assert peak is None and "train.peak_flops_per_rank gives one" in origin
    assert "mfu" not in progress_line(_record(1, mfu=None), 300)


def test_a_progress_line_reads_well():
    line = progress_line(_record(120, eval_loss=4.25), 300)
    assert line == (
        "step 120/300 | loss 2.0000 | grad norm 1.000 | lr 1.00e-03 | 0.500 s | 20 tokens/s | mfu 10.0% | "
        "held-out loss 4.2500"
    )

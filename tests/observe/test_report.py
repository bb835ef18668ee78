"""The report says what the metrics say, also of a run that has hardly begun."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from hpc_train.config_read import dump_yaml, load_config
from hpc_train.errors import ConfigError, DataError
from hpc_train.observe.report import report_command
from hpc_train.observe.run_record import read_run, summarise


def _run(tmp_path: Path, lines: list[dict], entropy: float | None = 5.0) -> Path:
    prefix = tmp_path / "corpus"
    if entropy is not None:
        Path(f"{prefix}.json").write_text(json.dumps({"unigram_entropy_nats": entropy}))
    config = load_config("tiny", [f"data.train.0.prefix={prefix}"])
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_yaml(config))
    (run / "plan.json").write_text('{"world_size": 4}')
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def _line(step: int, **changes: object) -> dict:
    line = {"step": step, "loss": 6.0 - step / 10, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100, "step_time_s": 1.0}
    return line | {"tokens_per_s": 100.0, "mfu": 0.2, "skipped": False} | changes


def test_figures_come_from_the_metrics_and_the_corpus(tmp_path):
    lines = [
        _line(1, tokens_per_s=1.0, skipped=True, loss=0.0, supervised_tokens=0),  # as earlier versions wrote it
        _line(2, eval_loss=5.5, supervised_tokens=90),
        _line(3, skipped=True, loss=None, supervised_tokens=0),
        _line(4, eval_loss=4.2),
    ]
    summary = summarise(read_run(_run(tmp_path, lines)))
    assert (summary.ranks, summary.steps, summary.skipped_steps, summary.tokens) == (4, 4, 2, 400)
    assert (summary.first_loss, summary.last_loss) == (5.8, 5.6)
    assert (summary.heldout_loss, summary.best_heldout_loss) == (4.2, 4.2)
    assert summary.gain_nats == pytest.approx(0.8)
    assert summary.tokens_per_s == 100.0  # the first step pays for what is done once


def test_the_report_is_written_with_a_picture(tmp_path, capsys):
    run = _run(tmp_path, [_line(1), _line(2, eval_loss=4.5)])
    assert report_command(argparse.Namespace(run=str(run), out=None, json=False)) == 0
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "report.json").read_text())["gain_nats"] == pytest.approx(0.5)
    assert "held-out loss" in (run / "report.md").read_text()
    assert "0.500 nats" in capsys.readouterr().out


def test_a_run_without_rates_heldout_or_entropy_says_so(tmp_path, capsys):
    """FC-97: a job that ended in second 0."""
    run = _run(tmp_path, [_line(1, tokens_per_s=None, mfu=None, step_time_s=0.0, loss=None)], entropy=None)
    assert report_command(argparse.Namespace(run=str(run), out=str(tmp_path / "out"), json=True)) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["tokens_per_s"] is None
    assert figures["gain_nats"] is None
    assert (tmp_path / "out/report.md").read_text().count("n/a") >= 5


def test_a_folder_without_a_run_or_without_steps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run folder"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="has taken none"):
        read_run(_run(tmp_path, []))


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    run = _run(tmp_path, [_line(1)])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "loss": ')
    assert [step["step"] for step in read_run(run).steps] == [1]

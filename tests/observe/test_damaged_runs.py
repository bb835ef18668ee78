"""Run folders with a file that is missing, cut or damaged: each command says which, and shows what is whole."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_train.cli import main
from hpc_train.config_read import dump_yaml, load_config
from hpc_train.errors import ConfigError, ExitCode
from hpc_train.launch.run_folder import Owner, claim
from hpc_train.launch.submitted_jobs import SubmittedJob, note_job
from tests.observe.traces import write_pipeline

RANK_FILE = "trace/attempt_0001/rank_00000.trace"
CLOCK_FILE = "trace/attempt_0001/clock.json"
LINES = ("attempts.jsonl", "submitted.jsonl", "metrics.jsonl")
OBJECTS = ("outcome.json", "owner.json", "plan.json", CLOCK_FILE, "corpus.json")
FILES = ("config.yaml", *LINES, *OBJECTS, RANK_FILE)

OWNER = Owner("elsewhere", 7, 7, None, 0, "then")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _circle(path: Path) -> None:
    """Nobody may read a link to itself, root neither."""
    path.unlink()
    path.symlink_to(path)


def _text(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


DAMAGES: dict[str, Callable[[Path], object]] = {
    "absent": Path.unlink,
    "empty": _text(""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "random": lambda path: path.write_bytes(random.Random(5).randbytes(3000)),
    "null": _text("null\n"),
    "list": _text("[1]\n"),
    "text": _text('"no object"'),
    "nested": lambda path: path.write_text("[" * (1_000 if path.suffix == ".yaml" else 20_000)),
    "odd": _text('{"step": "a", "loss": "b", "nodes": 3, "outcome": 7, "host": [], "job_id": 1, "world_size": "x"}\n'),
    "nan": _text('{"step": 1, "loss": NaN, "unigram_entropy_nats": Infinity, "world_size": 1e999, "exit_code": "0"}\n'),
    "folder": _folder,
    "circle": _circle,
}


SILENT = {("metrics.jsonl", "cut"), *((file, "empty") for file in LINES)}
"""What no command need tell: a line that is being written, and files without a line."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs that are done."""
    runs = tmp_path_factory.mktemp("sound") / "runs"
    for name in ("one", "two"):
        run = runs / "little" / name
        write_pipeline(run, 2, 3)
        held = claim(run, OWNER, lambda job: None)
        held.begin_attempt()
        held.release()
        note_job(run, SubmittedJob("12", "little-then"))
        for file, values in (
            ("outcome.json", {"outcome": "done", "exit_code": 0, "reason": "all steps"}),
            ("plan.json", {"world_size": 2}),
            ("corpus.json", {"unigram_entropy_nats": 5.0}),
        ):
            (run / file).write_text(json.dumps(values))
        lines = [{"step": step, "loss": 5.0, "tokens": 10, "tokens_per_s": 2.0, "mfu": None} for step in (1, 2, 3, 4)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "config.yaml").write_text(dump_yaml(load_config("tiny", ["data.train.0.prefix=corpus"])))
    return runs


def _code(command: str, file: str, damage: str) -> int:
    """What docs/reference/exit-codes.md says of a command that meets this."""
    if file == "config.yaml" and command == "doctor":
        return int(ExitCode.USAGE)
    if command == "report" and file == "metrics.jsonl" and damage != "cut":
        return int(ExitCode.DATA)
    if command == "trace" and file == RANK_FILE and damage not in ("absent", "empty", "cut"):
        return int(ExitCode.DATA)
    if command == "trace" and file == CLOCK_FILE and damage != "absent":
        return int(ExitCode.DATA)
    return int(ExitCode.DONE)


READERS = {
    "status": {"attempts.jsonl", "submitted.jsonl", "metrics.jsonl", "outcome.json", "owner.json"},
    "report": {"config.yaml", "metrics.jsonl", "plan.json", "corpus.json"},
    "trace": {RANK_FILE, CLOCK_FILE},
    "doctor": {"config.yaml"},
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named_and_hides_nothing_else(
    sound: Path, tmp_path: Path, monkeypatch, capsys, file: str, damage: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    monkeypatch.setattr("hpc_train.observe.report.draw_loss", lambda run, summary, path: None)
    runs = tmp_path / "runs"
    shutil.copytree(sound, runs)
    run = runs / "little" / "one"
    monkeypatch.chdir(run)
    if file == "owner.json":
        claim(run, OWNER, lambda job: None)
    DAMAGES[damage](run / file)
    commands = {
        "status": ["status", "--runs-dir", str(runs)],
        "report": ["report", str(run)],
        "trace": ["trace", str(run)],
        "doctor": ["doctor", str(run / "config.yaml")],
    }
    for command, words in commands.items():
        if command == "doctor" and file != "config.yaml":
            continue
        capsys.readouterr()
        assert main(words) == _code(command, file, damage), command
        said = "".join(capsys.readouterr())
        is_told = damage not in ("absent", "odd", "nan") and (file, damage) not in SILENT
        if file in READERS[command] and is_told:
            assert ("rank 0" if (file, damage) in ((RANK_FILE, "empty"), (RANK_FILE, "cut")) else file) in said, command
        if command == "status":
            assert "little/one" in said and "little/two" in said
    assert main(["status", str(run), "--json"]) == 0
    assert main(["status", "one", "--runs-dir", str(runs)]) == 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_whose_end_cannot_be_read_is_damaged_and_was_started(
    sound: Path, tmp_path: Path, monkeypatch, capsys, damage: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shutil.copytree(sound / "little" / "one", tmp_path / "run")
    DAMAGES[damage](tmp_path / "run" / "outcome.json")
    assert main(["status", str(tmp_path / "run"), "--json"]) == 0
    (status,) = json.loads(capsys.readouterr().out)
    assert "never started" not in status["note"]
    assert (status["state"], status["exit_code"], status["attempt"]) == (
        "ended" if damage == "absent" else "damaged",
        None,
        1,
    )
    assert [str(tmp_path / "run" / "outcome.json") in text for text in status["damaged"]] == [True] * (
        damage != "absent"
    )


def test_figures_that_are_damaged_are_left_out_and_the_others_shown(
    sound: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shutil.copytree(sound / "little" / "one", tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": "a", "loss": "b"}\n{"step": 5, "loss": 4.0}\n\xff\n{"step": 6, "lo')
    assert main(["status", str(tmp_path / "run"), "--json"]) == 0
    (status,) = json.loads(capsys.readouterr().out)
    assert (status["state"], status["step"], status["loss"], status["exit_code"]) == ("done", 5, 4.0, 0)
    assert len(status["damaged"]) == 2
    monkeypatch.chdir(tmp_path / "run")
    assert main(["report", ".", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["steps"], figures["last_loss"]) == (5, 4.0)
    assert len(figures["notes"]) == 2


def test_a_start_is_not_counted_where_earlier_ones_cannot_be(tmp_path: Path) -> None:
    held = claim(tmp_path, OWNER, lambda job: None)
    (tmp_path / "attempts.jsonl").write_text('{"attempt": 1}\nnull\n')
    with pytest.raises(ConfigError, match=r"attempts\.jsonl is damaged: line 2 holds no JSON object"):
        held.begin_attempt()


@pytest.mark.parametrize("out", ["file/in/the/way", "file"])
def test_a_report_that_cannot_be_written_is_a_fault_of_usage(
    sound: Path, tmp_path: Path, monkeypatch, capsys, out: str
) -> None:
    monkeypatch.chdir(sound / "little" / "one")
    (tmp_path / "file").touch()
    assert main(["report", ".", "--out", str(tmp_path / out)]) == 2
    assert "--out" in capsys.readouterr().err

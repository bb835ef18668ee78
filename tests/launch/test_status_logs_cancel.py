from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.cli import main
from hpc_train.launch import logs
from hpc_train.launch.run_folder import Owner, claim, start_ticks, this_process
from hpc_train.launch.submitted_jobs import SubmittedJob, note_job
from tests.launch.fakes import FakeCommands


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """Slurm with an empty queue, and a folder `runs` in the current folder."""
    fakes = FakeCommands(tmp_path / "bin")
    fakes.add("squeue", "")
    fakes.add("sacct", "")
    fakes.add("scancel", "")
    monkeypatch.setenv("PATH", fakes.path)
    monkeypatch.chdir(tmp_path)
    return fakes


def make_run(name: str, outcome: dict[str, object] | None = None) -> Path:
    folder = Path("runs") / "little" / name
    (folder / "logs").mkdir(parents=True)
    (folder / "config.request.yaml").write_text("name: little\n")
    if outcome is not None:
        (folder / "outcome.json").write_text(json.dumps(outcome))
    return folder


def status_json(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["status", "--json", *words]) == 0
    statuses: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return statuses


def test_a_run_in_the_queue_is_pending_with_slurm_s_reason(
    queue: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("12")
    queue.add("squeue", "12|PENDING|lit|tle|0:00|1:00:00|(Priority)\n")
    assert status_json(capsys)[0] | {"run_dir": ""} == {
        "run_dir": "", "name": "little", "job_id": "12", "state": "pending", "attempt": 0, "step": None,
        "loss": None, "tokens_per_s": None, "exit_code": None, "note": "PENDING (Priority)", "damaged": [],
    }  # fmt: skip


def test_a_run_with_a_live_driver_shows_its_newest_whole_line_of_metrics(
    queue: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run("2026-11-29_10-00-00")
    claim(folder, this_process(socket.gethostname()), lambda job: None).begin_attempt()
    lines = [{"step": 1, "loss": 5.0, "tokens_per_s": 100.0}, {"step": 2, "loss": 4.5, "tokens_per_s": None}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo'
    (folder / "metrics.jsonl").write_text(text)
    status = status_json(capsys, str(folder))[0]
    assert (status["state"], status["step"], status["loss"], status["attempt"]) == ("running", 2, 4.5, 1)


@pytest.mark.parametrize(
    ("outcome", "state", "exit_code"),
    [
        ({"outcome": "done", "exit_code": 0, "reason": "all ranks ended well"}, "done", 0),
        ({"outcome": "failed", "exit_code": 4, "reason": "rank 1 on n2: cut short\nmore"}, "failed", 4),
    ],
)
def test_a_run_that_is_over_shows_its_outcome(
    queue: FakeCommands,
    capsys: pytest.CaptureFixture[str],
    outcome: dict[str, object],
    state: str,
    exit_code: int,
) -> None:
    make_run("12", outcome)
    status = status_json(capsys, "12")[0]
    assert (status["state"], status["exit_code"]) == (state, exit_code)
    assert status["note"] == str(outcome["reason"]).splitlines()[0]


def test_a_driver_that_is_gone_without_an_outcome_is_said_to_be(
    queue: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run("2026-11-29_10-00-00")
    claim(folder, Owner(socket.gethostname(), 999999999, 1, None, 0, "then"), lambda job: None)
    status = status_json(capsys)[0]
    assert status["state"] == "ended"
    assert "gone without a word" in str(status["note"])


def test_what_slurm_keeps_of_a_past_job_is_asked_for_one_run(
    queue: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("12")
    queue.add("sacct", "NODE_FAIL\n")
    assert status_json(capsys, "12")[0]["note"] == "job 12 is NODE_FAIL"


def test_runs_are_a_table_and_an_empty_folder_is_said_to_be(
    queue: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 0
    assert "no runs in" in capsys.readouterr().out
    make_run("12", {"outcome": "done", "exit_code": 0, "reason": "all ranks ended well"})
    assert main(["status"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["RUN", "JOB", "STATE"]
    assert row.split()[:4] == ["little/12", "12", "done", "0"]


def test_status_works_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    make_run("2026-11-29_10-00-00", {"outcome": "done", "exit_code": 0, "reason": "well"})
    assert status_json(capsys)[0]["state"] == "done"


@pytest.mark.parametrize(
    ("text", "words"),
    [("99", "no run of job 99"), ("nowhere", "neither a run folder nor a job id"), ("runs", "not that of a run")],
)
def test_a_run_that_is_not_there_is_refused(
    queue: FakeCommands, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    make_run("12")
    assert main(["status", text]) == 2
    assert words in capsys.readouterr().err


def write_logs(folder: Path) -> None:
    (folder / "ranks.tsv").write_text("rank\thost\n0\tn1\n1\tn1\n2\tn2\n")
    rank_0 = "2026-11-29T22:10:03.123 n1 r0 | step 1\n"
    (folder / "logs" / "job.log").write_text("hpc-train: 3 ranks\n" + rank_0)
    (folder / "logs" / "n1.log").write_text(rank_0 + "2026-11-29T22:10:03.124 n1 r1 | hello\n")
    (folder / "logs" / "n2.log").write_text("2026-11-29T22:10:03.125 n2 r2 | hello\n")
    (folder / "logs" / "agent-n1.log").write_text("2026-11-29T22:10:03.126 n1 agent | ready\n")


def test_logs_show_each_line_once_though_the_driver_copies_some(
    queue: FakeCommands, capfd: pytest.CaptureFixture[str]
) -> None:
    write_logs(make_run("12", {"outcome": "done", "exit_code": 0, "reason": "well"}))
    assert main(["logs", "12"]) == 0
    assert [line.rpartition(" | ")[2] for line in capfd.readouterr().out.splitlines()] == [
        "hpc-train: 3 ranks", "step 1", "hello", "hello",
    ]  # fmt: skip


def test_logs_of_one_rank_come_from_its_node(queue: FakeCommands, capfd: pytest.CaptureFixture[str]) -> None:
    write_logs(make_run("12"))
    assert main(["logs", "12", "--rank", "1"]) == 0
    assert capfd.readouterr().out == "2026-11-29T22:10:03.124 n1 r1 | hello\n"
    assert main(["logs", "12", "--rank", "3"]) == 2
    assert "its ranks are 0 to 2" in capfd.readouterr().err


def test_following_ends_with_the_run(queue: FakeCommands, capfd: pytest.CaptureFixture[str]) -> None:
    write_logs(make_run("12", {"outcome": "failed", "exit_code": 4, "reason": "cut short"}))
    assert main(["logs", "12", "-f", "--rank", "2"]) == 0
    captured = capfd.readouterr()
    assert captured.out == "2026-11-29T22:10:03.125 n2 r2 | hello\n"
    assert "failed, exit code 4: cut short" in captured.err


def test_following_goes_on_while_another_job_of_the_run_waits(
    queue: FakeCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the jobs of a chain; what is left of it when the run is done ends at once, and is not waited for."""
    monkeypatch.setattr(logs, "job_is_live", lambda job: False)
    interrupted = {"outcome": "interrupted", "exit_code": 10, "reason": "stopped after step 5"}
    folder = make_run("12", interrupted)
    note_job(folder, SubmittedJob("13", "little-then"))
    queue.add("squeue", "13|PENDING|little-then|0:00|1:00:00|(Dependency)\n")
    assert logs.how_it_ended(folder, None) is None
    (folder / "outcome.json").write_text(json.dumps({"outcome": "done", "exit_code": 0, "reason": "all steps"}))
    assert logs.how_it_ended(folder, None) == "done, exit code 0: all steps"
    (folder / "outcome.json").write_text(json.dumps(interrupted))
    queue.add("squeue", "13|PENDING|somebody else of this number|0:00|1:00:00|(Priority)\n")
    assert logs.how_it_ended(folder, None) == "interrupted, exit code 10: stopped after step 5"


@pytest.fixture
def driver() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def test_cancel_stops_a_driver_of_this_machine(
    queue: FakeCommands, driver: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run("2026-11-29_10-00-00")
    ticks = start_ticks(driver.pid)
    assert ticks is not None
    claim(folder, Owner(socket.gethostname(), driver.pid, ticks, None, 0, "then"), lambda job: None)
    assert main(["cancel", str(folder)]) == 0
    assert driver.wait(timeout=60) == -signal.SIGTERM
    assert f"process {driver.pid}" in capsys.readouterr().out


@pytest.mark.parametrize("batch", [True, False])
def test_cancel_of_a_batch_job_does_not_end_in_a_requeue(
    queue: FakeCommands, driver: subprocess.Popen[bytes], batch: bool
) -> None:
    """A driver that gets TERM ends with the code that asks for a requeue; in salloc there is nobody who asks."""
    folder = make_run("12")
    queue.add("squeue", "12|RUNNING|little|1:00|1:00:00|n1\n")
    queue.add("scontrol", f"JobId=12 JobName=little JobState=RUNNING BatchFlag={int(batch)} Reboot=0\n")
    claim(
        folder, Owner(socket.gethostname(), driver.pid, start_ticks(driver.pid) or 0, "12", 0, "then"), lambda job: None
    )
    assert main(["cancel", str(folder)]) == 0
    assert len(queue.calls("scancel")) == batch
    assert (driver.poll() is None) == batch


def test_cancel_never_signals_another_process_of_the_same_id(queue: FakeCommands) -> None:
    folder = make_run("2026-11-29_10-00-00")
    ours = dataclasses.replace(this_process(socket.gethostname()), start_ticks=1)
    claim(folder, ours, lambda job: None)
    assert ours.pid == os.getpid()
    assert main(["cancel", str(folder)]) == 2


def test_cancel_gives_a_job_to_scancel(queue: FakeCommands, capsys: pytest.CaptureFixture[str]) -> None:
    make_run("12")
    queue.add("squeue", "12|PENDING|little|0:00|1:00:00|(Priority)\n")
    assert main(["cancel", "12"]) == 0
    assert queue.calls("scancel")[0]["argv"] == ["12"]


def note(folder: Path, *jobs: str) -> None:
    for job in jobs:
        note_job(folder, SubmittedJob(job, "little-then"))


def test_cancel_ends_the_jobs_of_a_chain_that_wait_first_and_names_them(
    queue: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    note(make_run("12"), "13", "14", "15")
    others = "14|PENDING|little-then|0:00|1:00:00|(Dependency)\n15|PENDING|another user of this number|0:00|1:00:00|x\n"
    queue.add(
        "squeue", "12|RUNNING|little-then|1:00|1:00:00|n1\n13|PENDING|little-then|0:00|1:00:00|(Dependency)\n" + others
    )
    assert main(["cancel", "12"]) == 0
    assert [call["argv"] for call in queue.calls("scancel")] == [["13", "14"], ["12"]]
    said = capsys.readouterr().out
    assert "cancelled job 12 of" in said
    assert "jobs 13, 14 submitted to go on with it" in said


def test_cancel_between_the_jobs_of_a_chain_and_before_the_first_start_in_a_given_folder(
    queue: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the number of the job that waits as well."""
    note(make_run("12", {"outcome": "interrupted", "exit_code": 10, "reason": "its time is over"}), "13")
    line = "13|PENDING|little-then|0:00|1:00:00|(Dependency)"
    (queue.folder / "squeue").write_text(f"#!/bin/bash\n[[ $* != *--me* ]] || echo '{line}'\n")
    status = status_json(capsys, "12")[0]
    assert (status["state"], status["note"]) == ("pending", "job 13 PENDING (Dependency)")
    assert main(["cancel", "13"]) == 0
    assert [call["argv"] for call in queue.calls("scancel")] == [["13"]]
    assert "cancelled job 13 submitted to go on with it" in capsys.readouterr().out
    queue.add("squeue")
    assert main(["cancel", "12"]) == 2


TAKE_A_RUN = {
    "status": "state      ended", "logs": "", "cancel": "is not running", "stacks": "is not running",
    "report": "no metrics.jsonl", "trace": "no trace/", "ckpt ls": "no checkpoints in", "ckpt verify": "holds none",
    "ckpt convert": "holds none", "ckpt prune": "",
}  # fmt: skip
"""Every command that takes a run, and what it says of one that has a folder and has not begun."""


@pytest.mark.parametrize("command", TAKE_A_RUN)
def test_every_command_takes_a_run_by_folder_job_id_and_name(
    queue: FakeCommands, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder = make_run("12")
    options = {"ckpt prune": ["--keep", "1"], "ckpt convert": ["out"]}.get(command, [])

    def said(run: str) -> str:
        main([*command.split(), run, *options])
        return "".join(capsys.readouterr())

    for run in (str(folder), "12", "little", "little/12"):
        text = said(run)
        assert TAKE_A_RUN[command] in text and "hpc-train: error: no run" not in text
        assert str(folder) in text or command in ("logs", "ckpt prune")
    assert "no run of job 99 is in" in said("99")
    assert "nowhere" in said("nowhere")
    make_run("14")
    assert "little is the name of 2 runs; give one of them: little/12, little/14" in said("little")
    Path("little").mkdir()
    assert "of 2 runs" not in said("little")


def test_an_array_s_own_number_is_that_of_all_its_tasks(
    queue: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    for task in ("7_10", "7_9", "70_1"):
        make_run(task)
    running = "".join(f"7_{task}|RUNNING|little|1:00|1:00:00|n1\n" for task in (9, 10))
    queue.add("squeue", running + "7_[11-20%2]|PENDING|little|0:00|1:00:00|(JobArrayTaskLimit)\n")
    assert [status["job_id"] for status in status_json(capsys, "7")] == ["7_9", "7_10"]
    assert main(["status", "7"]) == 0
    text = capsys.readouterr().out
    assert "7_[11-20%2] has no run folder yet: PENDING (JobArrayTaskLimit)" in text
    assert "70_1" not in text
    for command in ("logs", "stacks"):
        assert main([command, "7"]) == 2
        assert "job 7 is an array, each of whose tasks is a run; give one of them: 7_9, 7_10" in capsys.readouterr().err
    assert main(["cancel", "7"]) == 0
    assert [call["argv"] for call in queue.calls("scancel")] == [["7"]]
    assert "cancelled all tasks of array 7" in capsys.readouterr().out
    queue.add("squeue")
    assert main(["cancel", "7"]) == 2
    assert "no task of array 7 is in the queue any more" in capsys.readouterr().err


def test_a_job_that_has_no_folder_yet_is_left_to_scancel(
    queue: FakeCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("12")
    queue.add("squeue", "7_[0-3]|PENDING|little|0:00|1:00:00|(Priority)\n")
    assert main(["cancel", "7"]) == 2
    assert "`scancel 7` ends it" in capsys.readouterr().err


def test_cancel_of_what_does_not_run_is_refused(queue: FakeCommands, capsys: pytest.CaptureFixture[str]) -> None:
    make_run("12", {"outcome": "done", "exit_code": 0, "reason": "well"})
    assert main(["cancel", "12"]) == 2
    assert "is not running" in capsys.readouterr().err
    assert queue.calls("scancel") == []

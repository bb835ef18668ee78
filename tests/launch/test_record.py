from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from hpc_train.config import LaunchConfig
from hpc_train.launch import record, run_folder, saved_last
from hpc_train.launch.children import terminations_raise
from hpc_train.launch.ranks import RanksEnd
from hpc_train.launch.record import (
    JobLog,
    Outcome,
    bound_by_progress,
    decide_outcome,
    environment_text,
    failure_text,
    write_outcome,
)
from hpc_train.launch.run_folder import newest_saved_step
from hpc_train.launch.saved_last import last_saved, stalled_starts
from hpc_train.log import LineWriter
from hpc_train.plan.run_files import CheckpointsNote, write_checkpoints_note


def failure(run_dir: Path, **more: object) -> None:
    record = {"rank": 3, "host": "n2", "time": "now", "exit_code": 4, "message": "corpus.bin is cut short"}
    (run_dir / "failure.json").write_text(json.dumps({**record, **more}))


@pytest.mark.parametrize(
    ("code", "outcome", "exit_code"),
    [(0, "done", 0), (3, "failed", 3), (14, "failed", 1), (139, "failed", 1), (-9, "failed", 1)],
)
def test_without_a_record_the_launcher_s_code_decides(tmp_path: Path, code: int, outcome: str, exit_code: int) -> None:
    decided = decide_outcome(tmp_path, RanksEnd(code))
    assert (decided.outcome, decided.exit_code) == (outcome, exit_code)


def test_a_run_that_was_told_to_stop_did_not_fail_although_its_ranks_were_killed(tmp_path: Path) -> None:
    failure(tmp_path, exit_code=143, message="bash was ended by SIGTERM")
    decided = decide_outcome(tmp_path, RanksEnd(143, forced="the driver got SIGTERM"), any_code=True)
    assert (decided.outcome, decided.exit_code) == ("stopped", 1)


def test_ranks_that_did_not_meet_are_a_failed_launch(tmp_path: Path) -> None:
    decided = decide_outcome(tmp_path, RanksEnd(143, "1 of 4 ranks were not heard from"))
    assert (decided.outcome, decided.exit_code) == ("failed", 3)


def test_the_first_failure_decides_whatever_code_the_launcher_ends_with(tmp_path: Path) -> None:
    failure(tmp_path)
    decided = decide_outcome(tmp_path, RanksEnd(143))
    assert decided.exit_code == 4
    assert decided.reason == "rank 3 on n2: corpus.bin is cut short"
    assert decided.failure is not None
    assert failure_text(decided.failure).startswith("first failure: rank 3 on n2 at now, exit code 4: corpus.bin")


def test_codes_above_127_are_passed_on_for_foreign_programs_only(tmp_path: Path) -> None:
    failure(tmp_path, exit_code=137)
    assert decide_outcome(tmp_path, RanksEnd(137)).exit_code == 1
    assert decide_outcome(tmp_path, RanksEnd(137), any_code=True).exit_code == 137


def test_what_a_rank_wrote_about_a_good_end_is_kept(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text('{"outcome": "requeue", "exit_code": 10, "reason": "time is up"}')
    decided = decide_outcome(tmp_path, RanksEnd(0))
    assert (decided.outcome, decided.exit_code, decided.reason) == ("requeue", 10, "time is up")


def test_running_out_of_memory_is_said_in_words(tmp_path: Path) -> None:
    assert "out of memory" in decide_outcome(tmp_path, RanksEnd(253)).reason


def test_the_traceback_is_shown_for_internal_errors_only(tmp_path: Path) -> None:
    assert "Traceback" in failure_text({"exit_code": 1, "traceback": "Traceback: ..."})
    assert "Traceback" not in failure_text({"exit_code": 2, "traceback": "Traceback: ..."})


def test_the_outcome_is_written_whole(tmp_path: Path) -> None:
    write_outcome(tmp_path, decide_outcome(tmp_path, RanksEnd(0)), attempt=2, job_id="7")
    record = json.loads((tmp_path / "outcome.json").read_text())
    assert {key: record[key] for key in ("outcome", "exit_code", "attempt", "job_id")} == {
        "outcome": "done", "exit_code": 0, "attempt": 2, "job_id": "7",
    }  # fmt: skip


def test_the_recorded_environment_has_what_matters_and_no_secrets() -> None:
    env = {
        "SLURM_JOB_ID": "7", "NCCL_DEBUG": "INFO", "PATH": "/bin", "HPC_TRAIN_RENDEZVOUS_TOKEN": "x",
        "WANDB_API_KEY": "x", "AWS_SECRET": "x", "EDITOR": "vi", "TORCH_AUTH": "x",
    }  # fmt: skip
    assert environment_text(env) == 'NCCL_DEBUG="INFO"\nPATH="/bin"\nSLURM_JOB_ID="7"\n'


def test_ranks_that_the_stop_signal_ended_while_they_started_are_started_again(tmp_path: Path) -> None:
    """USR2 comes to all processes of a step, also to those that have no handler yet."""
    decided = decide_outcome(tmp_path, RanksEnd(140), stop_signal=12)
    assert (decided.outcome, decided.exit_code) == ("interrupted", 10)
    assert "a rank got SIGUSR2 before it could handle it" in decided.reason
    assert decide_outcome(tmp_path, RanksEnd(140)).exit_code == 1


@pytest.mark.parametrize("quiet", [False, True])
def test_a_log_that_cannot_be_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    """The disk is full while agents write the last checkpoint to another store."""
    (tmp_path / "logs").mkdir()
    job_log = JobLog(tmp_path, quiet=quiet)
    with open("/dev/full", "w") as full, open("/dev/full", "wb", buffering=0) as output:
        os.dup2(full.fileno(), job_log._descriptor)
        monkeypatch.setattr(sys, "stdout", LineWriter(output.fileno(), "n1 driver"))
        job_log.say("the ranks have ended, and the node agents write on")


def saved(run_dir: Path, *steps: int, at_start: int | None = None) -> None:
    """Checkpoints of these steps, of which the start of the attempt found that of `at_start`."""
    for step in steps:
        (run_dir / f"checkpoints/step_{step:07d}").mkdir(parents=True)
    (run_dir / "attempts.jsonl").write_text(json.dumps({"attempt": 1, "saved_step": at_start}) + "\n")


@pytest.mark.parametrize(
    ("end", "begin"),
    [
        (RanksEnd(143, asked="the driver got SIGTERM"), "the driver got SIGTERM; the ranks ended before all had left"),
        (RanksEnd(143, forced="the driver got SIGINT"), "the driver got SIGINT"),
        (RanksEnd(1), "the launcher ended with code 1"),
    ],
)
def test_an_end_from_outside_says_what_was_saved_last(tmp_path: Path, end: RanksEnd, begin: str) -> None:
    reasons = [decide_outcome(tmp_path, end, stop_signal=12).reason]
    saved(tmp_path, 4, 7, at_start=4)
    reasons.append(decide_outcome(tmp_path, end, stop_signal=12).reason)
    saved(tmp_path, at_start=7)
    reasons.append(decide_outcome(tmp_path, end, stop_signal=12).reason)
    assert all(reason.startswith(begin) for reason in reasons), reasons
    assert [reason.rpartition("; ")[2] for reason in reasons] == [
        "nothing was saved",
        "step_0000007 was saved last",
        "nothing was saved since the start, so step_0000007 is still the newest",
    ]


def test_ranks_that_had_saved_were_interrupted_whatever_ended_their_launcher(tmp_path: Path) -> None:
    """TERM to mpirun alone: ranks save and say so, and mpirun ends with a code of its own."""
    reason = "stopped after step 7, which is saved: SIGTERM on 2 of 2 ranks"
    (tmp_path / "outcome.json").write_text(json.dumps({"outcome": "interrupted", "exit_code": 10, "reason": reason}))
    decided = decide_outcome(tmp_path, RanksEnd(1), stop_signal=12)
    assert (decided.outcome, decided.exit_code, decided.reason) == ("interrupted", 10, reason)
    failure(tmp_path)
    assert decide_outcome(tmp_path, RanksEnd(1), stop_signal=12).exit_code == 4


def test_a_rank_that_cannot_write_why_it_stops_says_it_by_its_code(tmp_path: Path) -> None:
    decided = decide_outcome(tmp_path, RanksEnd(10), stop_signal=12)
    assert (decided.outcome, decided.exit_code) == ("interrupted", 10)


def test_an_outcome_that_cannot_be_written_is_told_and_leaves_no_other_one_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "outcome.json").write_text(json.dumps({"outcome": "interrupted", "exit_code": 10}))
    monkeypatch.setattr(record, "write_atomically", fail)
    write_outcome(tmp_path, Outcome("failed", 5, "a save failed", None), attempt=1, job_id=None)
    told = capsys.readouterr().err
    assert f"could not be written to {tmp_path / 'outcome.json'} (No space left on device)" in told
    assert "exit code 5" in told and not (tmp_path / "outcome.json").exists()


def test_ranks_that_mpirun_ended_when_it_got_term_itself_were_interrupted(tmp_path: Path) -> None:
    """Seen with Open MPI 5: code 1 and no word; of a rank that died it says how, and ends with 128 and the signal."""
    failure(tmp_path, exit_code=1, kind="ended", returncode=-9, message="ended without a word: killed by SIGKILL")
    decided = decide_outcome(tmp_path, RanksEnd(1, is_silent=True), stop_signal=12)
    assert (decided.outcome, decided.exit_code) == ("interrupted", 10)
    assert decided.reason.startswith("mpirun ended its ranks without a word") and "nothing was saved" in decided.reason
    assert decide_outcome(tmp_path, RanksEnd(1), stop_signal=12).exit_code == 1


def test_what_was_saved_last_is_seen_in_another_folder_although_the_run_folder_was_full(tmp_path: Path) -> None:
    saved(tmp_path / "store", 2, 4)
    write_checkpoints_note(tmp_path, CheckpointsNote(str(tmp_path / "store/checkpoints"), 2))
    assert last_saved(tmp_path) == "step_0000004 was saved last"
    write_checkpoints_note(tmp_path, CheckpointsNote("hdfs://nn1/user/me/runs/a/1", 2))
    assert last_saved(tmp_path) == "step_0000002 was saved last"


@pytest.mark.parametrize("store", ["fails", "hangs", "is interrupted", "has a torn note"])
def test_a_store_that_does_not_say_what_was_saved_changes_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    release = threading.Event()

    def look(run_dir: Path) -> int | None:
        if store == "fails":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        if store == "has a torn note":
            return newest_saved_step(run_dir)
        if store == "is interrupted":
            os.kill(os.getpid(), signal.SIGHUP)
        release.wait()
        return None

    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/elsewhere.json").write_text("{")
    monkeypatch.setattr(saved_last, "newest_saved_step", look)
    monkeypatch.setattr(run_folder, "newest_saved_step", look)
    monkeypatch.setattr(saved_last, "_PATIENCE_S", 60.0 if store == "is interrupted" else 0.1)
    lines: list[str] = []
    with terminations_raise():
        decided = decide_outcome(tmp_path, RanksEnd(10), stop_signal=12)
        assert decide_outcome(tmp_path, RanksEnd(0)).reason == "all ranks ended well"
        bound = bound_by_progress(decided, lambda: stalled_starts(tmp_path, "7", lines.append), LaunchConfig())
    release.set()
    assert (decided.outcome, decided.exit_code) == ("interrupted", 10) and bound == decided
    words = {
        "fails": "Stale file handle",
        "hangs": "did not answer for 0.1 s",
        "is interrupted": "got SIGHUP while",
        "has a torn note": "elsewhere.json, which says where the run's checkpoints are, cannot be read",
    }[store]
    assert "; what was saved last is not known: " in decided.reason and words in decided.reason
    assert len(lines) == 1 and "saved nothing new is not known: " in lines[0] and words in lines[0]

"""Who is named when ranks end: what they and their agents recorded, against what the launcher said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_train.launch.first_failure import first_failure
from hpc_train.launch.launcher_words import BadEnd
from hpc_train.launch.ranks import RanksEnd
from hpc_train.launch.record import Outcome, decide_outcome, write_outcome

KILLED = "ended without a word: killed by signal 9 (SIGKILL)"
LOST = "Connection closed by peer [127.0.0.1]:1234"


def table(run_dir: Path, *rows: tuple[int, str, int, str]) -> None:
    lines = ["rank\thost\tnode_rank\tlocal_rank\tslurm_procid"]
    lines += [f"{rank}\t{host}\t0\t{local_rank}\t{procid}" for rank, host, local_rank, procid in rows]
    (run_dir / "ranks.tsv").write_text("\n".join(lines) + "\n")


def on_slurm(run_dir: Path) -> None:
    table(run_dir, (0, "n1", 0, "0"), (1, "n2", 0, "2"), (2, "n1", 1, "1"), (3, "n2", 1, "3"))


def on_one_machine(run_dir: Path) -> None:
    table(run_dir, (0, "vm", 0, "-"), (1, "vm", 1, "-"), (2, "vm", 2, "-"))


def recorded(run_dir: Path, kind: str, rank: int, message: str, exit_code: int = 1, **more: Any) -> None:
    record = {"rank": rank, "host": "n1", "time": "now", "exit_code": exit_code, "message": message, "kind": kind}
    record |= more
    (run_dir / "failure.json").write_text(json.dumps(record))


def decided(run_dir: Path, end: RanksEnd, **more: Any) -> Outcome:
    outcome = decide_outcome(run_dir, end, **more)
    write_outcome(run_dir, outcome, attempt=1, job_id=None)
    return outcome


def on_record(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "failure.json").read_text())


def test_the_agent_s_record_names_the_rank_that_died(tmp_path: Path) -> None:
    on_one_machine(tmp_path)
    recorded(tmp_path, "ended", 1, KILLED)
    outcome = decided(tmp_path, RanksEnd(137, bad_end=BadEnd("mpirun", (1,), signal=9)))
    assert (outcome.outcome, outcome.exit_code, outcome.reason) == ("failed", 1, f"rank 1 on n1: {KILLED}")
    assert on_record(tmp_path)["message"] == KILLED


@pytest.mark.parametrize("kind", ["follows", "ended", None])
def test_a_task_that_srun_could_not_start_is_named_and_none_of_those_that_it_ended_for_it(
    tmp_path: Path, kind: str | None
) -> None:
    """As seen after a requeue, where a socket of the last start was left on one node."""
    if kind is not None:
        recorded(tmp_path, kind, 3, KILLED)
    told = "srun: error: task 2 launch failed: Unspecified error"
    end = RanksEnd(137, said=(told, "x"), bad_end=BadEnd("srun", (0, 1, 3), signal=9))
    cause = "srun could not start task 2: Unspecified error; the log of slurmd on its node tells why"
    assert decided(tmp_path, end).reason == f"all ranks: {cause}"
    on_slurm(tmp_path)
    assert decided(tmp_path, end).reason == f"rank 1 on n2: {cause}"
    recorded(tmp_path, "own", 3, "a fault")
    assert decided(tmp_path, end).reason == "rank 3 on n1: a fault"


@pytest.mark.parametrize("kind", ["follows", None])
def test_without_an_agent_the_launcher_names_it(tmp_path: Path, kind: str | None) -> None:
    """Rank 0 has lost rank 1 and says so, or was ended before it could."""
    on_slurm(tmp_path)
    if kind is not None:
        recorded(tmp_path, kind, 0, LOST)
    outcome = decided(tmp_path, RanksEnd(137, bad_end=BadEnd("srun", (2,), signal=9)))
    named = "ended without a word; srun says that it was killed by signal 9 (SIGKILL)"
    assert (outcome.exit_code, outcome.reason) == (1, f"rank 1 on n2: {named}")
    record = on_record(tmp_path)
    assert (record["rank"], record["host"], record["kind"], record["message"]) == (1, "n2", "ended", named)


def test_the_launcher_adds_the_signal_and_the_memory_that_the_agent_did_not_see(tmp_path: Path) -> None:
    on_slurm(tmp_path)
    recorded(tmp_path, "ended", 1, "ended without a word")
    bad_end = BadEnd("srun", (2,), signal=9, is_out_of_memory=True)
    outcome = decided(tmp_path, RanksEnd(137, bad_end=bad_end))
    assert outcome.reason.endswith(
        "rank 1 on n1: ended without a word; srun says that it was killed by signal 9 (SIGKILL), since memory was out"
    )


def test_of_two_that_were_killed_the_one_that_the_launcher_saw_first_is_named(tmp_path: Path) -> None:
    """The agent of the first one's node is gone; the other was ended by the launcher, and its agent saw that."""
    on_slurm(tmp_path)
    recorded(tmp_path, "ended", 0, KILLED)
    assert decided(tmp_path, RanksEnd(137, bad_end=BadEnd("srun", (3,), signal=11))).reason.startswith("rank 3 on n2")


CANCELLED = "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-30T10:00:00 DUE to SIGNAL Killed ***"


@pytest.mark.parametrize("kind", ["ended", "follows", None])
@pytest.mark.parametrize(
    ("end", "told"),
    [
        (
            RanksEnd(137, said=(CANCELLED, "x"), bad_end=BadEnd("srun", (0, 1, 2, 3), signal=9)),
            "srun says that all 4 were killed at once by signal 9 (SIGKILL). The whole step was ended from outside, "
            f"and no rank has failed (Slurm said: {CANCELLED})",
        ),
        (
            RanksEnd(137, said=("x",), bad_end=BadEnd("srun", (0, 1, 2, 3), signal=9, is_out_of_memory=True)),
            "srun says that all 4 were killed at once by signal 9 (SIGKILL), since memory was out. The whole step was "
            "ended from outside, and no rank has failed (nobody said by whom; `sacct -j JOB -o jobid,state%40` may)",
        ),
        (
            RanksEnd(-9),
            "the launcher itself was ended by signal 9 (SIGKILL), and they with it. The whole step was ended from "
            "outside, and no rank has failed (nobody said by whom)",
        ),
    ],
)
def test_of_a_step_that_was_ended_as_a_whole_no_rank_is_named_as_the_one_that_failed(
    tmp_path: Path, kind: str | None, end: RanksEnd, told: str
) -> None:
    """scancel --signal=KILL, a limit on the memory of the whole step, a launcher that somebody killed."""
    on_slurm(tmp_path)
    if kind is not None:
        recorded(tmp_path, kind, 1, KILLED, returncode=-9 if kind == "ended" else None)
    outcome = decided(tmp_path, end)
    seen = f". Seen first: rank 1 on n1: {KILLED}" if kind is not None else ""
    assert (outcome.outcome, outcome.exit_code) == ("failed", 1)
    assert outcome.reason == f"all ranks: {told}{seen}"
    assert (on_record(tmp_path)["kind"], on_record(tmp_path)["rank"]) == ("outside", None)


def test_the_death_that_made_somebody_end_the_whole_step_is_what_counts(tmp_path: Path) -> None:
    on_slurm(tmp_path)
    fault = "ended without a word: killed by signal 11 (SIGSEGV)"
    recorded(tmp_path, "ended", 1, fault, returncode=-11)
    assert decided(tmp_path, RanksEnd(-9)).reason == f"rank 1 on n1: {fault}"


def test_a_launcher_that_is_killed_behind_a_rank_that_failed_is_not_the_cause(tmp_path: Path) -> None:
    """The agent of that rank's node is gone too, so only srun has told of it."""
    on_slurm(tmp_path)
    fault = "ended without a word; srun says that it was killed by signal 11 (SIGSEGV)"
    assert decided(tmp_path, RanksEnd(-9, bad_end=BadEnd("srun", (2,), signal=11))).reason == f"rank 1 on n2: {fault}"
    left = decided(tmp_path, RanksEnd(-9, bad_end=BadEnd("srun", (2,), exit_code=7)))
    assert "no rank has failed" not in left.reason


def test_ranks_that_were_killed_together_but_not_with_all_others_are_named_together(tmp_path: Path) -> None:
    on_slurm(tmp_path)
    recorded(tmp_path, "ended", 3, KILLED, returncode=-9)
    outcome = decided(tmp_path, RanksEnd(137, bad_end=BadEnd("srun", (2, 3), signal=9)))
    assert outcome.reason == (
        f"rank 3 on n1: {KILLED}; srun says that it was killed by signal 9 (SIGKILL), with ranks 1, 3 at once"
    )


@pytest.mark.parametrize("bad_end", [None, BadEnd("srun", (2,), exit_code=1), BadEnd("srun", (2,), signal=15)])
def test_where_nobody_saw_an_end_the_rank_that_lost_another_says_so(tmp_path: Path, bad_end: BadEnd | None) -> None:
    on_slurm(tmp_path)
    recorded(tmp_path, "follows", 0, LOST)
    outcome = decided(tmp_path, RanksEnd(1, said=("srun: error: Node failure on n2",), bad_end=bad_end))
    assert outcome.reason == (
        f"rank 0 on n1: lost another rank or its agent, and nobody saw what ended that: {LOST}. "
        "srun said: srun: error: Node failure on n2"
    )


def test_a_rank_s_own_error_counts_most(tmp_path: Path) -> None:
    on_slurm(tmp_path)
    recorded(tmp_path, "own", 3, "the disk is full", exit_code=5)
    end = RanksEnd(137, asked="the driver got SIGTERM", bad_end=BadEnd("srun", (2,), signal=9))
    outcome = decided(tmp_path, end)
    assert (outcome.outcome, outcome.exit_code, outcome.reason) == ("failed", 5, "rank 3 on n1: the disk is full")


@pytest.mark.parametrize(("kind", "message"), [("ended", KILLED), ("follows", LOST)])
@pytest.mark.parametrize(
    ("end", "asked"),
    [
        (RanksEnd(137, asked="the driver got SIGTERM"), "the driver got SIGTERM"),
        (RanksEnd(140), "a rank got SIGUSR2 before it could handle it"),
        (
            RanksEnd(137, said=("srun: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-30T10:00:00 DUE TO TIME LIMIT ***",)),
            "srun: *** STEP 7.0",
        ),
    ],
)
def test_ranks_that_were_killed_in_an_interruption_are_no_failure(
    tmp_path: Path, kind: str, message: str, end: RanksEnd, asked: str
) -> None:
    """A warning that was too short: the node of one rank was cleared a moment before that of another."""
    recorded(tmp_path, kind, 0, message, returncode=-9 if kind == "ended" else None)
    outcome = decided(tmp_path, end, stop_signal=12)
    assert (outcome.outcome, outcome.exit_code) == ("interrupted", 10)
    assert outcome.reason.startswith(asked)
    assert f"(first rank 0 on n1: {message}); nothing was saved" in outcome.reason
    assert not (tmp_path / "failure.json").exists()


CTRL_C = "srun: sending Ctrl-C to StepId=7.1"
INTERRUPTED = "ended without a word: killed by signal 2 (SIGINT)"


@pytest.mark.parametrize(
    ("end", "seen", "who"),
    [
        (RanksEnd(130, bad_end=BadEnd("srun", (0, 1, 2, 3), signal=2)), None, "all ranks got SIGINT"),
        (RanksEnd(137, said=(CTRL_C, "x")), -2, "srun got SIGINT twice and passed it on"),
        (RanksEnd(137, said=(CTRL_C,), bad_end=BadEnd("srun", (0, 1, 2, 3), signal=9)), None, "srun got SIGINT twice"),
        (
            RanksEnd(130, bad_end=BadEnd("srun", (2,), signal=2)),
            -2,
            "rank 1 on n2 alone got SIGINT, and the others were ended for it",
        ),
        (RanksEnd(130, bad_end=BadEnd("srun", (0, 2), signal=2)), None, "ranks 0, 1 got SIGINT, and the others were"),
        (RanksEnd(130, bad_end=BadEnd("mpirun", (1,), signal=2)), -2, "rank 1 on n1 got SIGINT"),
        (RanksEnd(143, asked="the driver got SIGTERM"), -2, "rank 1 on n1 got SIGINT"),
        (RanksEnd(-2), None, "the ranks or the launcher got SIGINT"),
    ],
)
def test_who_sends_sigint_to_ranks_or_launcher_has_stopped_the_run_as_by_ctrl_c(
    tmp_path: Path, end: RanksEnd, seen: int | None, who: str
) -> None:
    """scancel --signal=INT, kill -INT of srun or of a rank; seen: by the agent of rank 1."""
    on_slurm(tmp_path)
    if seen is not None:
        recorded(tmp_path, "ended", 1, INTERRUPTED, returncode=seen)
    outcome = decided(tmp_path, end, stop_signal=12)
    assert (outcome.outcome, outcome.exit_code) == ("stopped", 1)
    assert outcome.reason.startswith(who) and outcome.reason.endswith("; nothing was saved"), outcome.reason
    assert not (tmp_path / "failure.json").exists()


@pytest.mark.parametrize(
    ("end", "returncode"),
    [
        (RanksEnd(130, said=(CTRL_C,)), -11),
        (RanksEnd(130, bad_end=BadEnd("srun", (0,), signal=2)), -11),
        (RanksEnd(137, said=(CTRL_C,)), -9),
        (RanksEnd(130, bad_end=BadEnd("srun", (2,), exit_code=5)), None),
    ],
)
def test_a_rank_that_failed_before_somebody_sent_sigint_to_the_others_is_named(
    tmp_path: Path, end: RanksEnd, returncode: int | None
) -> None:
    on_slurm(tmp_path)
    if returncode is not None:
        recorded(tmp_path, "ended", 1, "ended without a word: as it is", returncode=returncode)
    assert decided(tmp_path, end, stop_signal=12).outcome == "failed"


@pytest.mark.parametrize("returncode", [-11, -6, 7])
@pytest.mark.parametrize("end", [RanksEnd(137, asked="the driver got SIGTERM"), RanksEnd(140)])
def test_a_rank_that_ends_of_itself_in_an_interruption_has_failed(
    tmp_path: Path, returncode: int, end: RanksEnd
) -> None:
    recorded(tmp_path, "ended", 0, "ended without a word: as it is", returncode=returncode)
    outcome = decided(tmp_path, end, stop_signal=12)
    assert (outcome.outcome, outcome.exit_code) == ("failed", 1)
    assert outcome.reason.startswith("rank 0 on n1: ended without a word: as it is. It was to save and end: ")
    assert on_record(tmp_path)["returncode"] == returncode


def test_a_fault_in_an_interruption_of_which_only_the_launcher_knows_is_a_failure(tmp_path: Path) -> None:
    on_slurm(tmp_path)
    end = RanksEnd(139, asked="the driver got SIGTERM", bad_end=BadEnd("srun", (2,), signal=11))
    recorded(tmp_path, "ended", 1, "ended without a word")
    assert (
        "rank 1 on n1: ended without a word; srun says that it was killed by signal 11" in decided(tmp_path, end).reason
    )
    recorded(tmp_path, "follows", 0, LOST)
    assert decided(tmp_path, end).reason.startswith("rank 1 on n2: ended without a word; srun says")


def test_an_exit_code_of_the_table_in_an_interruption_is_a_failure_although_nobody_recorded_why(tmp_path: Path) -> None:
    """The disk was full: neither the checkpoint nor the record could be written."""
    outcome = decided(tmp_path, RanksEnd(5, asked="the driver got SIGTERM"))
    assert (outcome.outcome, outcome.exit_code) == ("failed", 5)


def test_a_rank_s_own_error_is_a_failure_although_a_wrapper_swallows_its_exit_code(tmp_path: Path) -> None:
    recorded(tmp_path, "own", 3, "cut short", exit_code=4)
    assert decided(tmp_path, RanksEnd(0)).exit_code == 4


def test_ranks_that_the_launcher_killed_since_one_left_with_a_reason_are_no_failure(tmp_path: Path) -> None:
    """The rank that was to record the reason was killed before it could; the exit code has it."""
    on_one_machine(tmp_path)
    recorded(tmp_path, "ended", 0, KILLED)
    assert decided(tmp_path, RanksEnd(3)).exit_code == 3
    assert not (tmp_path / "failure.json").exists()
    recorded(tmp_path, "ended", 0, KILLED)
    assert first_failure(tmp_path, RanksEnd(137, bad_end=BadEnd("srun", (1,), exit_code=4))) is None


@pytest.mark.parametrize("code", [5, 11])
def test_a_rank_that_a_library_ends_with_a_code_of_the_table_is_named(tmp_path: Path, code: int) -> None:
    """MPI_Abort with an error class: the code is the table's by chance, and the agent saw whose it was."""
    message = f"ended without a word: exit code {code}"
    recorded(tmp_path, "ended", 3, message, returncode=code)
    outcome = decided(tmp_path, RanksEnd(code, bad_end=BadEnd("srun", (2,), exit_code=code)))
    assert (outcome.exit_code, outcome.reason) == (code, f"rank 3 on n1: {message}")
    assert on_record(tmp_path)["rank"] == 3


@pytest.mark.parametrize("end", [RanksEnd(0), RanksEnd(143, forced="the driver got SIGINT"), RanksEnd(143, "too late")])
def test_ends_that_the_driver_caused_leave_no_failure_behind(tmp_path: Path, end: RanksEnd) -> None:
    recorded(tmp_path, "ended", 0, KILLED)
    decided(tmp_path, end)
    assert not (tmp_path / "failure.json").exists()

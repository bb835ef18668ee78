"""Interrupted jobs on a real Slurm cluster: each ends as one that was left alone, bit for bit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.plan import FaultPlan
from tests.train.requeued import Case, Centre, Interruption
from tests.train.runs import hpc_train, metrics

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

STEPS = 40


@pytest.fixture
def centre(slurm: Any, tmp_path: Path) -> Centre:
    return Centre(slurm, tmp_path)


def _alone(centre: Centre) -> list[dict[str, object]]:
    """The metrics of a run that nobody stops."""
    words = ["run", str(centre.folder / "config.yaml"), "-n", "2", "--run-dir", str(centre.folder / "alone")]
    done = hpc_train(words)
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics(centre.folder / "alone")


def _check(case: Case, alone: list[dict[str, object]], *, attempts: int | None = None) -> None:
    """It was interrupted, each start began with what the one before had saved, and it ended as if left alone."""
    starts = case.attempts()
    assert len(starts) >= 2 if attempts is None else len(starts) == attempts, case.log()
    assert [start["job_restarts"] for start in starts] == list(range(len(starts))), case.log()
    for number, start in enumerate(starts[1:], start=1):
        earlier = json.loads((case.folder / f"outcome-{number}.json").read_text())
        assert (earlier["outcome"], earlier["exit_code"]) == ("interrupted", 10), case.log()
        assert f"after step {start['saved_step']}, which is saved" in earlier["reason"], case.log()
    assert case.outcome()["exit_code"] == 0, case.log()
    assert metrics(case.folder) == alone, case.log()
    job_log = (case.folder / "logs/job.log").read_text()
    for number in range(1, len(starts) + 1):
        assert f"==== attempt {number}, job {case.job}" in job_log


def test_usr2_requeues_a_job_or_one_task_of_an_array_which_goes_on_bit_for_bit(centre: Centre) -> None:
    """FC-27, FC-36, FC-37, FC-39. USR2 comes to the steps, as from --signal=USR2@N, or to the shell, as from B:USR2@N.

    One job gets it three times in a row. Beside them a job that never saves ends with code 12, and is not tried again.
    """
    centre.prepare(FaultPlan().slow(0), steps=STEPS, eval_every=10)
    alone = _alone(centre)
    centre.prepare(FaultPlan().slow(250), steps=STEPS, eval_every=10)
    to_steps, to_shell = centre.scancel("--signal=USR2"), centre.scancel("--signal=USR2", "--batch")
    thrice = Case(
        "thrice", interruptions=[Interruption(3, to_steps), Interruption(9, to_shell), Interruption(15, to_steps)]
    )
    array = Case("array", array="1,2", interruptions=[Interruption(4, to_shell)])
    submitit = Case("submitit", via="submitit", interruptions=[Interruption(4, to_shell)])
    submitit_array = Case("both", via="submitit", array="3", interruptions=[Interruption(4, to_steps)])
    stuck = Case("stuck", overrides=["launch.requeue=failed", "launch.max_stalled=2"])
    for case in (thrice, array, submitit, submitit_array):
        centre.submit(case)
    centre.prepare(FaultPlan().kill(rank=1, step=2), steps=STEPS)
    centre.submit(stuck)
    centre.see_to_the_end([thrice, array, submitit, submitit_array, stuck], timeout_s=500)
    _check(thrice, alone, attempts=4)
    for case in (array, submitit, submitit_array):
        _check(case, alone, attempts=2)
    other = Case("other", folder=array.others[0], job=array.others[0].name)
    centre.see_to_the_end([other], timeout_s=100)
    assert len(other.attempts()) == 1, "a task beside the one that was interrupted"
    assert metrics(other.folder) == alone
    assert (stuck.outcome()["outcome"], stuck.outcome()["exit_code"]) == ("no progress", 12), stuck.log()
    assert len(stuck.attempts()) == 2
    deadline = time.monotonic() + 60.0
    while centre.processes() or centre.queue():  # a job that comes back is in it all the time
        assert time.monotonic() < deadline, f"left behind (FC-39): {centre.processes()} {centre.queue()}"
        time.sleep(0.2)


def _preempt(centre: Centre) -> Any:
    """A job of a partition that goes before takes the whole node for a moment."""

    def act(job: str) -> None:
        node = centre.slurm.run(["squeue", "--noheader", "--format=%N", "--jobs", job]).stdout.strip()
        words = [
            "sbatch",
            "-p",
            "main",
            "-w",
            node,
            "-N",
            "1-8",
            "--exclusive",
            "--output=/dev/null",
            "--wrap",
            "sleep 1",
        ]
        taken = centre.slurm.run(words)
        assert taken.returncode == 0, taken.stderr

    return act


@pytest.mark.long
def test_three_preemptions_in_a_row_lose_no_step_and_end_to_the_bit(centre: Centre) -> None:
    """By an operator's `scontrol requeue`, by a partition that goes before, and by `scontrol requeue` again."""
    centre.prepare(FaultPlan().slow(0), steps=STEPS, eval_every=10)
    alone = _alone(centre)
    centre.prepare(FaultPlan().slow(250), steps=STEPS, eval_every=10)

    def requeue(job: str) -> None:
        done = centre.slurm.run(["scontrol", "requeue", job])
        assert done.returncode == 0, done.stderr

    acts = [requeue, _preempt(centre), requeue]
    steps = [5, 14, 23]
    case = Case("preempted", flags=["-p", "low"], interruptions=list(map(Interruption, steps, acts)))
    centre.submit(case)
    centre.see_to_the_end([case], timeout_s=400)
    _check(case, alone, attempts=4)
    saved = [start["saved_step"] for start in case.attempts()]
    assert saved[0] is None, saved
    assert all(step <= told <= step + 8 for step, told in zip(steps, saved[1:], strict=True)), saved


def _time_limit_and_preemption(centre: Centre, cases: list[Case]) -> None:
    # More than a minute of steps, so that a job of one minute needs at least two starts.
    steps = 120
    centre.prepare(FaultPlan().slow(0), steps=steps, eval_every=50)
    alone = _alone(centre)
    centre.prepare(FaultPlan().slow(500), steps=steps, eval_every=50)
    for case in cases:
        centre.submit(case)
    centre.see_to_the_end(cases, timeout_s=540)
    for case in cases:
        _check(case, alone)
        for other in case.others:
            centre.see_to_the_end([Case("other", folder=other)], timeout_s=200)
            assert metrics(other) == alone


def _limited(name: str, **more: Any) -> Case:
    # No signal is asked for: the run ends itself before its minute is over.
    return Case(name, flags=["--time", "1"], **more)


def _preempted(centre: Centre, name: str, **more: Any) -> Case:
    return Case(name, flags=["-p", "low"], interruptions=[Interruption(30, _preempt(centre))], **more)


@pytest.mark.long
def test_a_time_limit_and_a_preemption_do_the_same(centre: Centre) -> None:
    cases = [
        _limited("limited"),
        _limited("limited-both", via="submitit", array="5"),
        _preempted(centre, "preempted-array", array="7"),
        _preempted(centre, "preempted-submitit", via="submitit"),
    ]
    _time_limit_and_preemption(centre, cases)


@pytest.mark.long
def test_the_mixtures_of_time_limit_preemption_way_and_array_that_are_left(centre: Centre) -> None:
    cases = [
        _limited("limited-array", array="5"),
        _limited("limited-submitit", via="submitit"),
        _preempted(centre, "preempted"),
        _preempted(centre, "preempted-both", via="submitit", array="7"),
    ]
    _time_limit_and_preemption(centre, cases)


@pytest.mark.long
def test_a_mesh_of_all_axes_over_four_nodes_is_preempted_and_goes_on_to_the_bit(centre: Centre) -> None:
    """pp=2, dp=2, tp=2 on 4 nodes x 2 ranks."""
    mesh = [
        "model.num_layers=3", "parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "parallel.sequence_parallel=true",
        "model.dropout=0.1",
    ]  # fmt: skip
    centre.prepare(FaultPlan().slow(0), steps=20, eval_every=10, global_batch_size=4)
    undisturbed = Case("undisturbed", num_nodes=4, overrides=mesh)
    centre.submit(undisturbed)
    centre.see_to_the_end([undisturbed], timeout_s=250)
    assert undisturbed.outcome()["exit_code"] == 0, undisturbed.log()
    centre.prepare(FaultPlan().slow(300), steps=20, eval_every=10, global_batch_size=4)
    preempted = Case(
        "preempted", num_nodes=4, overrides=mesh, flags=["-p", "low"], interruptions=[Interruption(5, _preempt(centre))]
    )
    centre.submit(preempted)
    centre.see_to_the_end([preempted], timeout_s=300)
    _check(preempted, metrics(undisturbed.folder), attempts=2)
    rows = [line.split("\t") for line in (preempted.folder / "ranks.tsv").read_text().splitlines()[1:]]
    assert [row[1] for row in rows] == ["n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"]
    assert [row[-4:] for row in rows] == [[pp, dp, "0", tp] for pp in "01" for dp in "01" for tp in "01"]

"""`hpc-train status`: what runs are doing, from their folders and from Slurm's queue."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import LaunchError
from hpc_train.launch.find_run import Run, all_runs, find_array, find_run
from hpc_train.launch.queue import QueuedJob, has_slurm, list_jobs, past_state
from hpc_train.launch.run_folder import read_attempts, read_owner
from hpc_train.launch.submitted_jobs import submitted_jobs
from hpc_train.plan.metrics_file import read_metrics
from hpc_train.plan.run_files import METRICS_FILE, OUTCOME_FILE, read_outcome

_TAIL_BYTES = 16384
_COLUMNS = ("RUN", "JOB", "STATE", "ATTEMPT", "STEP", "LOSS", "TOKENS/S", "NOTE")


@dataclass(frozen=True)
class RunStatus:
    """What is known of a run.

    state: pending, running, done, failed, interrupted, stopped, no progress, ended (without a record), damaged (how it
    ended cannot be read).
    damaged: which files of its folder cannot be read as they should, and why; what they say is left out.
    """

    run_dir: str
    name: str
    job_id: str | None
    state: str
    attempt: int
    step: int | None
    loss: float | None
    tokens_per_s: float | None
    exit_code: int | None
    note: str
    damaged: tuple[str, ...] = ()


def status_command(options: Namespace) -> int:
    """Carry out `status`."""
    runs_dir = Path(options.runs_dir)
    tasks = find_array(options.run, runs_dir) if options.run else []
    if options.run:
        runs = tasks or [find_run(options.run, runs_dir)]
    else:
        runs = list(all_runs(runs_dir))
    queue = _queue()
    statuses = [status_of(run, queue, ask_accounts=bool(options.run)) for run in runs]
    if options.json:
        print(json.dumps([asdict(status) for status in statuses], indent=1))
    elif not statuses:
        print(f"no runs in {runs_dir.absolute()}")
    elif options.run and not tasks:
        print(describe(statuses[0]))
    else:
        print(table(statuses))
        for job in _waiting_tasks(options.run, runs, queue or {}) if tasks else []:
            print(f"{job.job_id} has no run folder yet: {job.state} {job.reason}")
    return 0


def status_of(run: Run, queue: dict[str, QueuedJob] | None, *, ask_accounts: bool) -> RunStatus:
    """Put folder and queue together. queue None: Slurm cannot be asked."""
    damaged: list[str] = []
    read_owner(run.folder, damaged)
    outcome = read_outcome(run.folder, damaged)
    end_is_damaged = bool(damaged)
    attempts = read_attempts(run.folder, damaged)
    metrics = (read_metrics(run.folder / METRICS_FILE, damaged, tail_bytes=_TAIL_BYTES) or ({},))[-1]
    submitted_jobs(run.folder, damaged)
    state, note = _state(run, queue, outcome, len(attempts), ask_accounts)
    if end_is_damaged and state == "ended":
        state, note = "damaged", ""
    is_over = state not in ("running", "pending")
    return RunStatus(
        run_dir=str(run.folder),
        name=run.name,
        job_id=run.job_id,
        state=state,
        attempt=len(attempts),
        step=metrics.get("step"),
        loss=metrics.get("loss"),
        tokens_per_s=None if is_over else metrics.get("tokens_per_s"),
        exit_code=outcome.get("exit_code") if is_over else None,
        note="; ".join([*damaged, *([note] if note else [])]),
        damaged=tuple(damaged),
    )


def describe(status: RunStatus) -> str:
    """One run on several lines."""
    rows = [("run", status.run_dir), ("state", status.state), ("job", status.job_id or "-")]
    rows += [("attempt", str(status.attempt)), ("step", _text(status.step)), ("loss", _text(status.loss))]
    rows += [("tokens/s", _text(status.tokens_per_s)), ("exit code", _text(status.exit_code)), ("note", status.note)]
    return "\n".join(f"{name:10} {value}" for name, value in rows if value)


def table(statuses: list[RunStatus]) -> str:
    """A line a run."""
    rows = [list(_COLUMNS)]
    for status in statuses:
        numbers = [_text(status.step), _text(status.loss), _text(status.tokens_per_s)]
        name = f"{status.name}/{Path(status.run_dir).name}"
        rows.append([name, status.job_id or "-", status.state, str(status.attempt), *numbers, status.note])
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )


def _state(
    run: Run, queue: dict[str, QueuedJob] | None, outcome: dict[str, Any], num_starts: int, ask_accounts: bool
) -> tuple[str, str]:
    job = queue.get(run.job_id) if queue is not None and run.job_id else None
    if run.owner is not None:
        live = run.driver_is_live() if job is None else True
        if live is None:
            return "running", f"as far as {run.owner.host} says, which cannot be asked from here"
        if live:
            return "running", f"{run.owner.describe()}{f'; {job.elapsed} of {job.limit}' if job else ''}"
        return "ended", f"its driver is gone without a word: {run.owner.describe()}"
    if job is None and queue is not None:
        job = _next_job(run, queue)
    if job is not None and job.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"):
        return "pending", f"{'' if job.job_id == run.job_id else f'job {job.job_id} '}{job.state} {job.reason}"
    if outcome:
        return str(outcome.get("outcome")), str(outcome.get("reason", "")).partition("\n")[0]
    if job is not None:
        return "running", f"{job.state}; it has not claimed its folder yet"
    past = past_state(run.job_id) if ask_accounts and run.job_id and has_slurm() else None
    if past:
        return "ended", f"job {run.job_id} is {past}"
    if num_starts:
        return "ended", f"it left no {OUTCOME_FILE}; see its logs"
    return "ended", "never started, or removed from the queue"


def _waiting_tasks(array: str, runs: Sequence[Run], queue: Mapping[str, QueuedJob]) -> list[QueuedJob]:
    """Entries of the queue for tasks without a folder; Slurm has one for many tasks that wait: `7_[2-5]`."""
    known = {run.folder.name for run in runs}
    return [job for job in queue.values() if job.job_id.partition("_")[0] == array and job.job_id not in known]


def _next_job(run: Run, queue: Mapping[str, QueuedJob]) -> QueuedJob | None:
    """A job of the queue that was submitted to go on with a run."""
    for noted in submitted_jobs(run.folder):
        job = queue.get(noted.job_id)
        if job is not None and job.name == noted.job_name:
            return job
    return None


def _queue() -> dict[str, QueuedJob] | None:
    if not has_slurm():
        return None
    try:
        return {job.job_id: job for job in list_jobs(["--me"])}
    except LaunchError:
        return None


def _text(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}" if value < 1000 else f"{value:.0f}"

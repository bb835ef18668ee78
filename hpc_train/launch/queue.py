"""What Slurm's queue says of jobs, by squeue and sacct."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.cluster.environment import process_env
from hpc_train.errors import LaunchError

_GONE = "Invalid job id"
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"}
_QUICK_S = 30.0


@dataclass(frozen=True)
class QueuedJob:
    """A job of the queue. `reason` is why it waits, or the nodes it runs on."""

    job_id: str
    state: str
    name: str
    elapsed: str
    limit: str
    reason: str


def has_slurm() -> bool:
    return shutil.which("squeue") is not None


def job_is_live(job_id: str) -> bool | None:
    """Whether a job waits or runs; None where Slurm cannot be asked."""
    try:
        return find_job(job_id) is not None
    except LaunchError:
        return None


def find_job(job_id: str) -> QueuedJob | None:
    """A job that waits, runs or ends just now; None if the queue does not have it any more."""
    jobs = list_jobs(["--jobs", job_id])
    return jobs[0] if jobs else None


def is_batch_job(job_id: str) -> bool:
    """Whether a job runs a batch script, and does so now; false for salloc's and where Slurm cannot be asked."""
    try:
        words = ask(["scontrol", "--oneliner", "show", "job", job_id]).split()
    except LaunchError:
        return False
    return "JobState=RUNNING" in words and "BatchFlag=1" in words


def end_time_of(job_id: str) -> int | None:
    """When a job's time limit ends it, in epoch seconds; None without a limit or where Slurm cannot be asked."""
    try:
        # Slurm speaks local time unless it is told to count seconds.
        text = ask(
            ["squeue", "--noheader", "--format=%e", "--jobs", job_id], env={**process_env(), "SLURM_TIME_FORMAT": "%s"}
        )
    except LaunchError:
        return None
    word = text.strip()
    return int(word) if word.isdecimal() and int(word) > 0 else None


def list_jobs(filters: Sequence[str]) -> list[QueuedJob]:
    """Jobs of the queue that pass squeue's filters.

    Raises:
        LaunchError: squeue is missing or fails.
    """
    text = ask(["squeue", "--noheader", "--format=%i|%T|%j|%M|%l|%R", *filters])
    jobs = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) >= 6:
            # A job's name may hold the separator; state, times and reason cannot.
            jobs.append(QueuedJob(fields[0], fields[1], "|".join(fields[2:-3]), *fields[-3:]))
    return [job for job in jobs if job.state not in _ENDED]


def past_state(job_id: str) -> str | None:
    """The last state of a job that left the queue, where the site keeps accounts; else None."""
    try:
        text = ask(["sacct", "--noheader", "--parsable2", "--allocations", "--format=State", "--jobs", job_id])
    except LaunchError:
        return None
    return text.splitlines()[0].strip() if text.strip() else None


def job_id_in(answer: str) -> str:
    """The job id in what `sbatch --parsable` printed: `4711`, or `4711;CLUSTER`.

    Raises:
        LaunchError: there is none.
    """
    job_id = answer.strip().splitlines()[-1].partition(";")[0].strip() if answer.strip() else ""
    if not job_id.isdecimal():
        raise LaunchError(f"sbatch took the script but gave no job id; it said: {answer.strip()!r}")
    return job_id


def ask(
    argv: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    text: str = "",
    timeout_s: float | None = _QUICK_S,
) -> str:
    """The output of one of Slurm's commands.

    Raises:
        LaunchError: not installed, no answer, or an error, with Slurm's own words. A job that the queue has
            forgotten is no error: its answer is empty.
    """
    try:
        done = subprocess.run(
            list(argv),
            env=env,
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as problem:
        raise LaunchError(
            f"{argv[0]} is not on PATH: this machine is no login node of a Slurm cluster, or its module is not loaded"
        ) from problem
    except subprocess.TimeoutExpired as problem:
        raise LaunchError(f"{argv[0]} gave no answer in {timeout_s:.0f} s: {' '.join(argv)}") from problem
    if done.returncode != 0 and _GONE not in done.stderr:
        raise LaunchError(f"{argv[0]} refused with exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout if done.returncode == 0 else ""

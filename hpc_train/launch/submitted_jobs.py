"""Which jobs were submitted for a run folder that has not their number: a chain's later ones, and those of --run-dir.

Without this note nobody could find them before they start, so `cancel` could not stop them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_train.launch.queue import list_jobs
from hpc_train.plan.run_files import append_line, read_json_lines

SUBMITTED_FILE = "submitted.jsonl"


@dataclass(frozen=True)
class SubmittedJob:
    """A job and its name in Slurm, by which another job of the same number, years later, is told from it."""

    job_id: str
    job_name: str


def note_job(folder: Path, job: SubmittedJob) -> None:
    """Add a line for a job.

    Raises:
        OSError: it cannot be written.
    """
    append_line(folder / SUBMITTED_FILE, json.dumps(asdict(job)))


def submitted_jobs(folder: Path, problems: list[str] | None = None) -> list[SubmittedJob]:
    """The jobs that were noted, oldest first.

    problems: gets a sentence where the file is damaged; what is damaged is left out.
    """
    lines = read_json_lines(folder / SUBMITTED_FILE, problems)
    told = [(line.get("job_id"), line.get("job_name")) for line in lines]
    jobs = [SubmittedJob(job, name) for job, name in told if isinstance(job, str) and isinstance(name, str)]
    if len(jobs) < len(lines) and problems is not None:
        problems.append(f"{folder / SUBMITTED_FILE} is damaged: it has lines that name no job")
    return jobs


def jobs_in_queue(folder: Path) -> list[str]:
    """The ids of those of the noted jobs that wait or run.

    Raises:
        LaunchError: there are some, and Slurm cannot be asked.
    """
    noted = {job.job_id: job.job_name for job in submitted_jobs(folder)}
    if not noted:
        return []
    return [job.job_id for job in list_jobs(["--me"]) if noted.get(job.job_id) == job.name]

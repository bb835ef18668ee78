"""From what a user types, a job id or a folder, to a run folder and the Slurm job behind it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import ConfigError
from hpc_train.launch.batch_script import CONFIG_REQUEST_FILE
from hpc_train.launch.queue import job_is_live
from hpc_train.launch.run_folder import Owner, is_live, read_attempts, read_owner
from hpc_train.launch.submitted_jobs import submitted_jobs
from hpc_train.plan.run_files import ATTEMPTS_FILE, CONFIG_FILE


@dataclass(frozen=True)
class Run:
    """A run's folder, its driver if one claims it, and the Slurm job that started last or has the folder's name."""

    folder: Path
    owner: Owner | None
    job_id: str | None

    @property
    def name(self) -> str:
        return self.folder.parent.name

    def driver_is_live(self) -> bool | None:
        """None if that cannot be seen from here; false also where nobody claims the folder."""
        return False if self.owner is None else is_live(self.owner, socket.gethostname(), job_is_live)


def find_run(text: str, runs_dir: Path) -> Run:
    """The run that `text` names.

    Raises:
        ConfigError: there is none, or a job's run folder cannot be found.
    """
    folder = Path(text)
    if is_run_folder(folder):
        return read_run(folder.absolute())
    if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"{folder} is a folder that you may not read; ask its owner")
    if os.path.isdir(folder):
        raise ConfigError(f"{folder} is a folder, but not that of a run: it has no {CONFIG_FILE} or {ATTEMPTS_FILE}")
    if _is_job_name(text):
        for run in all_runs(runs_dir):
            noted = [job.job_id for job in submitted_jobs(run.folder)]
            if text in (run.folder.name, run.job_id, *_jobs_of(run.folder), *noted):
                return run
        if tasks := find_array(text, runs_dir):
            names = ", ".join(run.folder.name for run in tasks)
            raise ConfigError(f"job {text} is an array, each of whose tasks is a run; give one of them: {names}")
        waits = f". `scancel {text}` ends it if it waits and has no run folder yet" if job_is_live(text) else ""
        raise ConfigError(
            f"no run of job {text} is in {runs_dir.absolute()}. Give the folder of its runs by --runs-dir, or the "
            f"run folder itself{waits}"
        )
    raise ConfigError(f"{text} is neither a run folder nor a job id")


def find_array(text: str, runs_dir: Path) -> list[Run]:
    """The runs of the tasks of an array that have a folder, if `text` is an array's own job id; else none."""
    if not text.isdecimal() or Path(text).exists():
        return []
    runs = [
        run for run in all_runs(runs_dir) if _is_job_name(run.folder.name) and text in run.folder.name.split("_")[:-1]
    ]
    return sorted(runs, key=lambda run: int(run.folder.name.rpartition("_")[2]))


def all_runs(runs_dir: Path) -> Iterator[Run]:
    """Every run of a folder of runs, by name and then by age."""
    for name in sorted(path for path in runs_dir.glob("*") if os.path.isdir(path)):
        folders = [path for path in name.glob("*") if is_run_folder(path)]
        for folder in sorted(folders, key=lambda path: path.stat().st_ctime):
            yield read_run(folder.absolute())


def is_run_folder(folder: Path) -> bool:
    """Whether it has a file of a run's; false also where it may not be read."""
    return any(os.path.isfile(folder / name) for name in (CONFIG_FILE, CONFIG_REQUEST_FILE, ATTEMPTS_FILE))


def read_run(folder: Path) -> Run:
    owner = read_owner(folder)
    jobs = _jobs_of(folder)
    named = folder.name if _is_job_name(folder.name) else None
    return Run(folder, owner, (owner.job_id if owner else None) or (jobs[-1] if jobs else named))


def _jobs_of(folder: Path) -> list[str]:
    return [str(attempt["job_id"]) for attempt in read_attempts(folder) if attempt.get("job_id")]


def _is_job_name(name: str) -> bool:
    """123 or 120_3; a time such as 2026-11-29_22-10-03 is none."""
    return all(part.isdecimal() for part in name.split("_"))

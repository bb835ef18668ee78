"""From what a user types, a folder, a job id or a name, to a run folder and the Slurm job behind it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import ConfigError
from hpc_train.launch.queue import job_is_live
from hpc_train.launch.run_folder import Owner, is_live, read_attempts, read_owner
from hpc_train.launch.submitted_jobs import submitted_jobs
from hpc_train.plan.run_files import ATTEMPTS_FILE, CONFIG_FILE, is_run_folder


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
    run = _named_run(text, runs_dir)
    if run is None:
        raise ConfigError(f"{text} is neither a run folder nor a job id nor a run's name in {runs_dir.absolute()}")
    return run


def folder_of_run(text: str, runs_dir: Path) -> str:
    """The folder of the run that a job id or a name stands for.

    Text that is neither, as any path or URL, stays as it is: what lies there, if anything, is for its reader to judge.

    Raises:
        ConfigError: there is no run of this job, or the name is that of several.
    """
    run = None if os.path.lexists(text) else _named_run(text, runs_dir)
    return text if run is None else str(run.folder)


def _named_run(text: str, runs_dir: Path) -> Run | None:
    """The run of a job or of a name; None for text that is neither.

    Raises:
        ConfigError: as `folder_of_run`.
    """
    is_job = _is_job_name(text)
    for run in all_runs(runs_dir) if is_job else ():
        noted = [job.job_id for job in submitted_jobs(run.folder)]
        if text in (run.folder.name, run.job_id, *_jobs_of(run.folder), *noted):
            return run
    if is_run_folder(runs_dir / text):
        return read_run((runs_dir / text).absolute())
    named = list(_runs_in(runs_dir / text)) if len(Path(text).parts) == 1 else []
    if len(named) > 1:
        raise ConfigError(
            f"{text} is the name of {len(named)} runs; give one of them: "
            f"{', '.join(f'{text}/{run.folder.name}' for run in named)}"
        )
    if named or not is_job:
        return named[0] if named else None
    if tasks := find_array(text, runs_dir):
        names = ", ".join(run.folder.name for run in tasks)
        raise ConfigError(f"job {text} is an array, each of whose tasks is a run; give one of them: {names}")
    waits = f". `scancel {text}` ends it if it waits and has no run folder yet" if job_is_live(text) else ""
    raise ConfigError(
        f"no run of job {text} is in {runs_dir.absolute()}. Give the folder of its runs by --runs-dir, or the "
        f"run folder itself{waits}"
    )


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
        yield from _runs_in(name)


def _runs_in(folder: Path) -> Iterator[Run]:
    """The runs of one name, by age."""
    folders = [path for path in folder.glob("*") if is_run_folder(path)]
    for path in sorted(folders, key=lambda path: path.stat().st_ctime):
        yield read_run(path.absolute())


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

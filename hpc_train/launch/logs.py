"""`hpc-train logs`: the job's log and the nodes' logs of a run, once or for as long as it runs."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path

from hpc_train import log
from hpc_train.errors import ConfigError, ExitCode, LaunchError
from hpc_train.launch.find_run import Run, find_run, read_run
from hpc_train.launch.follow import POLL_S, GrowingFile, rank_of_line
from hpc_train.launch.queue import job_is_live
from hpc_train.launch.ranks import node_log
from hpc_train.launch.record import JOB_LOG
from hpc_train.launch.submitted_jobs import jobs_in_queue
from hpc_train.plan.run_files import RANKS_FILE, rank_log, read_outcome

_LOOK_FOR_END_S = 2.0
_REMEMBERED_LINES = 10000


def logs_command(options: Namespace) -> int:
    """Carry out `logs`."""
    run = find_run(options.run, Path(options.runs_dir))
    reader = LogReader(run.folder, options.rank)
    if not options.follow:
        reader.print_new()
        return 0
    _follow(run, reader, None)
    return 0


def follow_run(run: str, last_job: str) -> int:
    """Show the log of a run until its last job is over; returns the run's exit code."""
    found = find_run(run, Path())
    _follow(found, LogReader(found.folder, None), last_job)
    return int(read_outcome(found.folder).get("exit_code", ExitCode.INTERNAL))


class LogReader:
    """Prints lines that were not printed yet, of all ranks or of one.

    In a job the driver copies rank 0's lines into the job's log: a line that stands in two files is shown once.
    """

    def __init__(self, folder: Path, rank: int | None) -> None:
        self._folder = folder / "logs"
        self._rank = rank
        self._files: dict[Path, GrowingFile] = {}
        self._seen: dict[bytes, Path] = {}
        self._only = None if rank is None else log_of_rank(folder, rank)

    def print_new(self) -> None:
        for path in self._paths():
            reader = self._files.setdefault(path, GrowingFile(path))
            for line in reader.new_lines():
                if self._is_wanted(path, line):
                    sys.stdout.buffer.write(line)
        sys.stdout.flush()

    def _paths(self) -> list[Path]:
        if self._only is not None:
            return [self._only]
        nodes = sorted(path for path in self._folder.glob("*.log") if not path.name.startswith("agent-"))
        job = self._folder / JOB_LOG
        return [job, *(path for path in nodes if path != job)]

    def _is_wanted(self, path: Path, line: bytes) -> bool:
        if self._rank is not None:
            return rank_of_line(line) == self._rank
        if self._seen.setdefault(line, path) != path:
            return False
        while len(self._seen) > _REMEMBERED_LINES:
            del self._seen[next(iter(self._seen))]
        return True


def log_of_rank(folder: Path, rank: int) -> Path:
    """The log file of the node that a rank is on.

    Raises:
        ConfigError: the run has no such rank, or no table of ranks yet.
    """
    try:
        rows = [line.split("\t") for line in (folder / RANKS_FILE).read_text(encoding="utf-8").splitlines()[1:]]
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {RANKS_FILE} yet, so the node of rank {rank} is not known") from None
    if (own := rank_log(folder, rank)).exists():
        return own
    for row in rows:
        if row[0] == str(rank):
            return node_log(folder, row[1])
    raise ConfigError(f"the run has no rank {rank}; its ranks are 0 to {len(rows) - 1}")


def _follow(run: Run, reader: LogReader, last_job: str | None) -> None:
    next_look = 0.0
    while True:
        reader.print_new()
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + _LOOK_FOR_END_S
            end = how_it_ended(run.folder, last_job)
            if end is not None:
                reader.print_new()
                log.say(f"hpc-train: {end}", sys.stderr)
                return
        time.sleep(POLL_S)


def how_it_ended(folder: Path, last_job: str | None) -> str | None:
    """A sentence once nothing of a run will come any more; None while it waits or runs."""
    run = read_run(folder)
    if run.owner is not None and run.driver_is_live() is not False:
        return None
    job = last_job or run.job_id
    if job is not None and job_is_live(job):
        return None
    outcome = read_outcome(folder)
    if outcome.get("outcome") != "done" and _is_gone_on_with(folder):
        return None
    if outcome and read_run(folder).owner is None:
        return f"{outcome.get('outcome')}, exit code {outcome.get('exit_code')}: {outcome.get('reason')}"
    if run.owner is not None:
        return f"the driver is gone without a word: {run.owner.describe()}"
    return "the run is not in the queue, and its folder has no outcome"


def _is_gone_on_with(folder: Path) -> bool:
    """Whether another job waits for this run, as the next one of a chain does."""
    try:
        return bool(jobs_in_queue(folder))
    except LaunchError:
        return False

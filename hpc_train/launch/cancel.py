"""`hpc-train cancel`: stop a run, by its driver where that is on this machine, else by its Slurm job."""

from __future__ import annotations

import os
import signal
import socket
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hpc_train.errors import ConfigError, LaunchError
from hpc_train.launch.find_run import Run, find_array, find_run
from hpc_train.launch.queue import ask, is_batch_job, job_is_live
from hpc_train.launch.run_folder import Owner, start_ticks
from hpc_train.launch.submitted_jobs import jobs_in_queue

_PATIENCE_S = 30.0


def cancel_command(options: Namespace) -> int:
    """Carry out `cancel`."""
    runs_dir = Path(options.runs_dir)
    tasks = find_array(options.run, runs_dir)
    print(cancel_array(options.run, tasks) if tasks else cancel(find_run(options.run, runs_dir)))
    return 0


def cancel_array(job_id: str, tasks: Sequence[Run]) -> str:
    """Stop all tasks of an array, those that wait and have no folder yet as well, and say what was done.

    Raises:
        ConfigError: the array is over.
        LaunchError: Slurm refuses.
    """
    if job_is_live(job_id) is False:
        raise ConfigError(f"no task of array {job_id} is in the queue any more")
    ask(["scancel", job_id])
    folders = ", ".join(str(run.folder) for run in tasks)
    return f"cancelled all tasks of array {job_id}; the run folders of those that had one are {folders}"


def cancel(run: Run) -> str:
    """Stop a run, and jobs that wait to go on with it, and say what was done.

    Raises:
        ConfigError: there is nothing that could be stopped.
        LaunchError: it cannot be reached from here, or does not end.
    """
    waiting = [job_id for job_id in jobs_in_queue(run.folder) if job_id != run.job_id]
    if not waiting:
        return _stop(run)
    # First those that wait: each begins as soon as the one before has ended.
    ask(["scancel", *waiting])
    others = f"job{'s' if len(waiting) > 1 else ''} {', '.join(waiting)} submitted to go on with it"
    try:
        return f"{_stop(run)}, and {others}"
    except NothingToStop:
        return f"cancelled {others}: {run.folder} is not running"


class NothingToStop(ConfigError):
    """No driver and no job of a run are there."""


def _stop(run: Run) -> str:
    owner = run.owner
    # On TERM the driver of a batch job saves, and its script puts the job back into the queue.
    if run.job_id is not None and is_batch_job(run.job_id):
        ask(["scancel", run.job_id])
        return f"cancelled job {run.job_id} of {run.folder}"
    if owner is not None and owner.host == socket.gethostname() and start_ticks(owner.pid) == owner.start_ticks:
        _terminate(owner)
        return f"stopped the driver of {run.folder}, process {owner.pid}"
    if run.job_id is not None and job_is_live(run.job_id):
        ask(["scancel", run.job_id])
        return f"cancelled job {run.job_id} of {run.folder}"
    if owner is not None and run.driver_is_live() is None:
        raise LaunchError(f"the driver of {run.folder} is on {owner.host}; cancel it there ({owner.describe()})")
    raise NothingToStop(f"{run.folder} is not running: no driver claims it and no job of it is in the queue")


def _terminate(owner: Owner) -> None:
    """TERM, for which the run saves and ends; INT if it does not, which ends it at once.

    By a file descriptor of the process, so that no other process of the same id can get it.
    """
    try:
        descriptor = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            if start_ticks(owner.pid) == owner.start_ticks:
                signal.pidfd_send_signal(descriptor, number)
            if _has_ended(owner):
                return
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)
    raise LaunchError(f"process {owner.pid} got TERM and INT but still runs after {2 * _PATIENCE_S:.0f} s; see its log")


def _has_ended(owner: Owner) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while start_ticks(owner.pid) == owner.start_ticks:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True

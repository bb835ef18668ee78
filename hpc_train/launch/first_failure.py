"""Which rank's end was the first, from what ranks and agents put on record and from what the launcher said.

A rank's own error counts most. Where the record is only that a rank ended without a word, or that one lost another, the
launcher may know better: it is the parent of the ranks, on every node, and is told how each of them ended.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpc_train import log
from hpc_train.cluster.process_end import describe_signal
from hpc_train.errors import ExitCode
from hpc_train.launch.launcher_words import NOT_LAUNCHED, SAYS_ENDED, SAYS_INTERRUPTED, BadEnd
from hpc_train.launch.ranks import RanksEnd
from hpc_train.log import FAILURE_FILE, FailureKind, kind_of, origin_of
from hpc_train.plan.run_files import RANKS_FILE, write_atomically

_OF_THE_TABLE = {int(code) for code in ExitCode} - {int(ExitCode.DONE), int(ExitCode.INTERNAL)}
_BY_OTHERS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Signals that a process gets from somebody else; by all others it ends of itself."""
_MOST_NAMED = 8


def first_failure(run_dir: Path, end: RanksEnd) -> dict[str, Any] | None:
    """The record of the first failure of an attempt that has ended, or None where nobody knows of one."""
    recorded = log.read_failure(run_dir)
    if recorded is not None and kind_of(recorded) is FailureKind.OWN:
        return recorded
    if left_with_reason(end):
        # A rank has said what is wrong by its code, and the launcher ended the others for it.
        return None if recorded is None else _who_left(recorded)
    tasks = _tasks(run_dir)
    not_launched = next(filter(None, map(NOT_LAUNCHED.match, end.said)), None)
    if not_launched is not None and (recorded is None or was_ended(recorded)):
        return _of_no_launch(tasks.get(int(not_launched[1])), not_launched)
    outside = _from_outside(end, tasks)
    if outside is not None and (recorded is None or was_ended(recorded)):
        return _of_all_ranks(recorded, outside, end)
    if end.bad_end is None or not end.bad_end.is_death:
        return recorded
    return _with_launcher(recorded, end.bad_end, tasks)


def was_ended(failure: Mapping[str, Any]) -> bool:
    """Whether a rank may have been ended by somebody else, as in an interruption, and has not failed by itself."""
    if kind_of(failure) is FailureKind.ENDED:
        returncode = failure.get("returncode")
        return returncode is None or -returncode in _BY_OTHERS
    return kind_of(failure) is not FailureKind.OWN


def who_was_interrupted(run_dir: Path, end: RanksEnd, failure: Mapping[str, Any] | None) -> str | None:
    """Who got SIGINT, by which somebody stopped the run as by Ctrl-C; None: nobody, or a rank has failed by itself.

    failure: what `first_failure` says of this end.
    """
    if left_with_reason(end) if failure is None else not was_ended(failure):
        return None
    seen = failure if failure is not None and kind_of(failure) is FailureKind.ENDED else {}
    returncode = seen.get("returncode")
    if returncode not in (None, -signal.SIGINT):
        return None
    if any(SAYS_INTERRUPTED.search(line) for line in end.said):
        return "srun got SIGINT twice and passed it on"
    told = _interrupted_tasks(run_dir, end.bad_end)
    if told is not None:
        return told
    if returncode is not None:
        return f"{origin_of(seen)} got SIGINT"
    is_by_code = end.code in (-signal.SIGINT, 128 + signal.SIGINT)
    is_by_code = is_by_code or (end.bad_end is not None and end.bad_end.signal == signal.SIGINT)
    return "the ranks or the launcher got SIGINT" if is_by_code else None


def _interrupted_tasks(run_dir: Path, bad_end: BadEnd | None) -> str | None:
    """Which ranks got SIGINT, by what the launcher said; None where it did not say."""
    if bad_end is None or bad_end.signal != signal.SIGINT or bad_end.says == "mpirun":  # which tells of one of them
        return None
    tasks = _tasks(run_dir)
    named = [tasks[task] for task in bad_end.tasks if task in tasks]
    if not named:
        return None
    if len(named) == len(tasks):
        return "all ranks got SIGINT"
    who = f"rank {named[0][0]} on {named[0][1]} alone" if len(named) == 1 else _named(rank for rank, _ in named)
    return f"{who} got SIGINT, and the others were ended for it"


def keep_failure(run_dir: Path, failure: Mapping[str, Any] | None) -> None:
    """Leave on record what has been decided on: an end that an interruption or the driver caused is no failure."""
    recorded = log.read_failure(run_dir)
    if failure is not None and failure != recorded:
        write_atomically(run_dir / FAILURE_FILE, json.dumps(failure, indent=1))
    elif failure is None and recorded is not None and kind_of(recorded) is not FailureKind.OWN:
        (run_dir / FAILURE_FILE).unlink(missing_ok=True)


def left_with_reason(end: RanksEnd) -> bool:
    """Whether a rank left with a code of the table of exit codes."""
    return end.code in _OF_THE_TABLE or (end.bad_end is not None and end.bad_end.exit_code in _OF_THE_TABLE)


def _who_left(recorded: dict[str, Any]) -> dict[str, Any] | None:
    """The record, with the code that the rank left with; None where the rank was ended for one that left."""
    if kind_of(recorded) is not FailureKind.ENDED:
        return recorded
    code = recorded.get("returncode")
    return {**recorded, "exit_code": code} if code in _OF_THE_TABLE else None


def _from_outside(end: RanksEnd, tasks: Mapping[int, tuple[int, str]]) -> str | None:
    """How all ranks were ended together, where they were; else one ended, and the launcher ended the others for it."""
    bad_end = end.bad_end
    if end.code < 0 and (bad_end is None or bad_end.signal in _BY_OTHERS):
        return f"the launcher itself was ended by {describe_signal(-end.code)}, and they with it"
    if bad_end is None or bad_end.signal != signal.SIGKILL or len(tasks) < 2 or not tasks.keys() <= {*bad_end.tasks}:
        return None
    memory = ", since memory was out" if bad_end.is_out_of_memory else ""
    return f"{bad_end.says} says that all {len(tasks)} were killed at once by {describe_signal(bad_end.signal)}{memory}"


def _of_no_launch(place: tuple[int, str] | None, told: re.Match[str]) -> dict[str, Any]:
    """The record that srun could not start a task, and so ended the others. place: its rank and host, where known."""
    rank, host = place or (None, None)
    return log.failure_record(
        rank=rank,
        host=host,
        exit_code=int(ExitCode.INTERNAL),
        message=f"srun could not start task {told[1]}: {told[2]}; the log of slurmd on its node tells why",
        kind=FailureKind.OUTSIDE if place is None else FailureKind.ENDED,
    )


def _of_all_ranks(recorded: Mapping[str, Any] | None, how: str, end: RanksEnd) -> dict[str, Any]:
    """The record that the whole step was ended from outside, with what is known of by whom."""
    told = next((line for line in end.said if SAYS_ENDED.search(line)), None)
    where = "; `sacct -j JOB -o jobid,state%40` may" if end.said else ""
    by = f"Slurm said: {told}" if told is not None else f"nobody said by whom{where}"
    seen = "" if recorded is None else f". Seen first: {origin_of(recorded)}: {recorded.get('message')}"
    return log.failure_record(
        rank=None,
        host=None,
        exit_code=int(ExitCode.INTERNAL),
        message=f"{how}. The whole step was ended from outside, and no rank has failed ({by}){seen}",
        kind=FailureKind.OUTSIDE,
        when=None if recorded is None else recorded["time"],
    )


def _with_launcher(
    recorded: dict[str, Any] | None, bad_end: BadEnd, tasks: Mapping[int, tuple[int, str]]
) -> dict[str, Any] | None:
    """The record with what the launcher says of it, or one of the launcher's own."""
    assert bad_end.signal is not None
    how = f"killed by {describe_signal(bad_end.signal)}"
    how += ", since memory was out" if bad_end.is_out_of_memory else ""
    named = [tasks[task] for task in bad_end.tasks if task in tasks]
    is_one = len(named) < 2 or bad_end.signal != signal.SIGKILL
    how += "" if is_one else f", with {_named(rank for rank, _ in named)} at once"
    is_seen = recorded is not None and kind_of(recorded) is FailureKind.ENDED
    if recorded is not None and is_seen and (not named or recorded.get("rank") in [rank for rank, _ in named]):
        is_known = is_one and not bad_end.is_out_of_memory
        is_known = is_known and describe_signal(bad_end.signal) in str(recorded["message"])
        addition = "" if is_known else f"; {bad_end.says} says that it was {how}"
        returncode = recorded.get("returncode")
        returncode = -bad_end.signal if returncode is None else returncode
        return {**recorded, "message": f"{recorded['message']}{addition}", "returncode": returncode}
    if not named:
        return recorded
    rank, host = named[0]
    return log.failure_record(
        rank=rank,
        host=host,
        exit_code=int(ExitCode.INTERNAL),
        message=f"ended without a word; {bad_end.says} says that it was {how}",
        kind=FailureKind.ENDED,
        returncode=-bad_end.signal,
        when=None if recorded is None else recorded["time"],
    )


def _named(ranks: Iterable[int]) -> str:
    """`ranks 2, 3`, and no more than a line has room for."""
    first = sorted(ranks)
    more = f" and {len(first) - _MOST_NAMED} more" if len(first) > _MOST_NAMED else ""
    return f"ranks {', '.join(map(str, first[:_MOST_NAMED]))}{more}"


def _tasks(run_dir: Path) -> dict[int, tuple[int, str]]:
    """Rank and host by the launcher's number of a task; empty where it is not known which task is which rank."""
    try:
        header, *lines = (run_dir / RANKS_FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    rows = [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]
    places = {row["slurm_procid"]: row for row in rows}
    if set(places) == {"-"} and len({row["host"] for row in rows}) == 1:
        places = {row["local_rank"]: row for row in rows}  # mpirun on one machine counts its slots
    return {int(task): (int(row["rank"]), row["host"]) for task, row in places.items() if task.isdecimal()}

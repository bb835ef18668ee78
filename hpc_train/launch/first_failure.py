"""Which rank's end was the first, from what ranks and agents put on record and from what the launcher said.

A rank's own error counts most. Where the record is only that a rank ended without a word, or that one lost another, the
launcher may know better: it is the parent of the ranks, on every node, and is told how each of them ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_train import log
from hpc_train.cluster.process_end import describe_signal
from hpc_train.errors import ExitCode
from hpc_train.launch.launcher_words import BadEnd
from hpc_train.launch.ranks import RanksEnd
from hpc_train.log import FAILURE_FILE, FailureKind, kind_of
from hpc_train.plan.run_files import RANKS_FILE, write_atomically

_OF_THE_TABLE = {int(code) for code in ExitCode} - {int(ExitCode.DONE), int(ExitCode.INTERNAL)}


def first_failure(run_dir: Path, end: RanksEnd) -> dict[str, Any] | None:
    """The record of the first failure of an attempt that has ended, or None where nobody knows of one."""
    recorded = log.read_failure(run_dir)
    if recorded is not None and kind_of(recorded) is FailureKind.OWN:
        return recorded
    if _left_with_reason(end):
        # A rank has said what is wrong by its code, and the launcher ended the others for it.
        return None if recorded is None or kind_of(recorded) is FailureKind.ENDED else recorded
    if end.bad_end is None or not end.bad_end.is_death:
        return recorded
    return _with_launcher(recorded, end.bad_end, _tasks(run_dir))


def keep_failure(run_dir: Path, failure: Mapping[str, Any] | None) -> None:
    """Leave on record what has been decided on: an end that an interruption or the driver caused is no failure."""
    recorded = log.read_failure(run_dir)
    if failure is not None and failure != recorded:
        write_atomically(run_dir / FAILURE_FILE, json.dumps(failure, indent=1))
    elif failure is None and recorded is not None and kind_of(recorded) is not FailureKind.OWN:
        (run_dir / FAILURE_FILE).unlink(missing_ok=True)


def _left_with_reason(end: RanksEnd) -> bool:
    return end.code in _OF_THE_TABLE or (end.bad_end is not None and end.bad_end.exit_code in _OF_THE_TABLE)


def _with_launcher(
    recorded: dict[str, Any] | None, bad_end: BadEnd, tasks: Mapping[int, tuple[int, str]]
) -> dict[str, Any] | None:
    """The record with what the launcher says of it, or one of the launcher's own."""
    assert bad_end.signal is not None
    how = f"killed by {describe_signal(bad_end.signal)}"
    how += ", since memory was out" if bad_end.is_out_of_memory else ""
    named = [tasks[task] for task in bad_end.tasks if task in tasks]
    is_seen = recorded is not None and kind_of(recorded) is FailureKind.ENDED
    if recorded is not None and is_seen and (not named or recorded.get("rank") in [rank for rank, _ in named]):
        is_known = describe_signal(bad_end.signal) in str(recorded["message"]) and not bad_end.is_out_of_memory
        addition = "" if is_known else f"; {bad_end.says} says that it was {how}"
        return {**recorded, "message": f"{recorded['message']}{addition}"}
    if not named:
        return recorded
    rank, host = named[0]
    return {
        "rank": rank,
        "host": host,
        "time": recorded["time"] if recorded is not None else log.timestamp(),
        "exit_code": int(ExitCode.INTERNAL),
        "message": f"ended without a word; {bad_end.says} says that it was {how}",
        "kind": str(FailureKind.ENDED),
        "traceback": "",
    }


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

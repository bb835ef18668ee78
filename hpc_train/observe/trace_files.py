"""The trace files of a run: which attempts and ranks there are, which are chosen, and their rows step by step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hpc_train.errors import ConfigError, DataError
from hpc_train.observe.rank_trace import RankTrace
from hpc_train.observe.rank_trace import read_rank as read_rank_file
from hpc_train.plan.run_files import CONFIG_FILE, is_run_folder, read_json
from hpc_train.record import (
    CLOCK_FILE,
    COMMUNICATION,
    TRACE_FOLDER,
    Kind,
    attempt_folder,
    attempts_in,
    rank_trace_file,
    ranks_in,
)


@dataclass(frozen=True)
class TraceFolder:
    """One attempt's files. steps of different attempts are on different clocks, so they are not mixed.

    clock: by node, the offset of its clock and how wrong that may be, in ns.
    """

    path: Path
    ranks: tuple[int, ...]
    clock: dict[int, tuple[int, int]] = field(default_factory=dict)


def find_trace(run_dir: Path, attempt: int | None = None) -> TraceFolder:
    """The files of an attempt; None for the newest.

    Raises:
        ConfigError: no run folder, or it has no such attempt.
        DataError: nothing was recorded there, or the file of the nodes' clocks is damaged.
    """
    folder = run_dir / TRACE_FOLDER
    known = attempts_in(folder)
    if not known and not is_run_folder(run_dir):
        what = f"it has no {CONFIG_FILE}" if os.path.isdir(run_dir) else "there is no such folder"
        raise ConfigError(f"{run_dir} is no run folder: {what}. Runs are at runs/NAME/JOB_OR_TIME.")
    if not known:
        raise DataError(
            f"{run_dir} has no {TRACE_FOLDER}/ with an attempt in it: no rank has recorded a step there. Was it run "
            "with observe.trace=false?"
        )
    if attempt is not None and attempt not in known:
        raise ConfigError(f"{folder} has no attempt {attempt}; it has {', '.join(map(str, known))}.")
    path = folder / attempt_folder(known[-1] if attempt is None else attempt)
    ranks = tuple(ranks_in(path))
    if not ranks:
        raise DataError(f"{path} has no files of ranks.")
    return TraceFolder(path, ranks, _read_clock(path / CLOCK_FILE))


def _read_clock(path: Path) -> dict[int, tuple[int, int]]:
    """Empty where there is no such file, as on a disk that was full when the run started."""
    problems: list[str] = []
    tree = read_json(path, problems)
    if tree is not None:
        try:
            return {int(node): (int(one["offset_ns"]), int(one["error_ns"])) for node, one in tree["nodes"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            problems = [f"{path} is damaged: it does not say the offset_ns and error_ns of nodes"]
    if problems:
        raise DataError(f"{problems[0]}. Restore it; or remove it, and each node's times stay on its own clock.")
    return {}


def read_rank(folder: TraceFolder, rank: int, steps: range | None = None) -> RankTrace:
    """A rank's rows of these steps, None for all.

    Raises:
        DataError: its file is damaged, of another version, or cannot be read.
    """
    return read_rank_file(folder.path / rank_trace_file(rank), rank, folder.clock, steps)


def parse_ranges(text: str, what: str) -> tuple[range, ...]:
    """`0-3,8` as ranges.

    Raises:
        ConfigError: it is not of this form.
    """
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        is_form = len(part) < 40 and first.isdecimal() and (last.isdecimal() if dash else True)
        if not is_form or (dash and int(last) < int(first)):
            raise ConfigError(f"{what} {text!r} is not understood at {part!r}; write for example 3, 0-7 or 0-3,8.")
        ranges.append(range(int(first), int(last if dash else first) + 1))
    return tuple(ranges)


def choose_ranks(folder: TraceFolder, text: str | None) -> tuple[int, ...]:
    """The ranks with files that `text` names, all without it.

    Raises:
        ConfigError: a rank that it names has no file.
    """
    if text is None:
        return folder.ranks
    known, chosen = set(folder.ranks), set()
    for part in parse_ranges(text, "--ranks"):
        for rank in part:
            if rank not in known:
                raise ConfigError(
                    f"rank {rank} has no file in {folder.path}; {len(folder.ranks)} ranks have one, "
                    f"{folder.ranks[0]} to {folder.ranks[-1]}."
                )
            chosen.add(rank)
    return tuple(sorted(chosen))


def rows_of(traces: Sequence[RankTrace], *, beside: bool = False) -> Iterator[tuple[RankTrace, int, np.ndarray]]:
    """Rank by rank and step by step; beside: also of the steps before and behind the chosen ones."""
    for trace in traces:
        rows = {**trace.rows, **trace.beside} if beside else trace.rows
        for step in sorted(rows):
            yield trace, step, rows[step]


def step_span(trace: RankTrace, rows: np.ndarray) -> tuple[int, int] | None:
    """Begin and end of the step that rows are of; None where it has not ended, as at a crash."""
    ids = [index for index, name in enumerate(trace.names) if name.kind is Kind.STEP]
    steps = rows[np.isin(rows[:, 0], ids)]
    return (int(steps[0, 1]), int(steps[0, 3])) if len(steps) else None


def chosen_span(trace: RankTrace) -> tuple[int, int] | None:
    """Begin of the first and end of the last chosen step that has ended; None where none has."""
    spans = [span for rows in trace.rows.values() if (span := step_span(trace, rows)) is not None]
    return (min(begin for begin, _ in spans), max(end for _, end in spans)) if spans else None


def awaited_elsewhere(trace: RankTrace) -> Iterator[tuple[int, list[int]]]:
    """Transfers that are under way in the chosen steps and awaited in another one, with the number of that step."""
    span = chosen_span(trace)
    if span is None:
        return
    for step, rows in sorted(trace.beside.items()):
        for row in rows[(rows[:, 1] < span[1]) & (rows[:, 3] > span[0])].tolist():
            if trace.names[row[0]].kind in COMMUNICATION:
                yield step, row

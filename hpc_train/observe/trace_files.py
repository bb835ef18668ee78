"""The trace files of a run's ranks, read back: which there are, and the rows of chosen steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.errors import DataError
from hpc_train.plan.run_files import read_json
from hpc_train.record import CLOCK_FILE, COLUMNS, TRACE_FOLDER, Kind, Name, attempt_folder, rank_trace_file

_ROW_BYTES = 8 * len(COLUMNS)
_LONGEST_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded in the chosen steps, on the clock of rank 0's node.

    rows: of each step (n, columns), int64. num_dropped: rows of the whole attempt that are in no file.
    clock_error_ns: how wrong the times may be against rank 0's node.
    """

    rank: int
    node: str
    names: tuple[Name, ...]
    rows: dict[int, np.ndarray]
    num_dropped: int = 0
    clock_error_ns: int = 0


@dataclass(frozen=True)
class TraceFolder:
    """One attempt's files. steps of different attempts are on different clocks, so they are not mixed."""

    path: Path
    ranks: tuple[int, ...]
    clock: dict[int, tuple[int, int]] = field(default_factory=dict)


def find_trace(run_dir: Path, attempt: int | None = None) -> TraceFolder:
    """The files of an attempt; None for the newest.

    Raises:
        DataError: there are none.
    """
    folder = run_dir / TRACE_FOLDER
    known = sorted(int(path.name.rpartition("_")[2]) for path in folder.glob("attempt_*") if path.is_dir())
    if not known:
        raise DataError(
            f"{run_dir} has no {TRACE_FOLDER}/ with an attempt in it: no rank has recorded a step there. Was it run "
            "with observe.trace=false?"
        )
    if attempt is not None and attempt not in known:
        raise DataError(f"{folder} has no attempt {attempt}; it has {', '.join(map(str, known))}.")
    path = folder / attempt_folder(known[-1] if attempt is None else attempt)
    ranks = tuple(sorted(int(file.stem.rpartition("_")[2]) for file in path.glob("rank_*.trace")))
    if not ranks:
        raise DataError(f"{path} has no files of ranks.")
    offsets = (read_json(path / CLOCK_FILE) or {}).get("nodes", {})
    return TraceFolder(path, ranks, {int(node): (one["offset_ns"], one["error_ns"]) for node, one in offsets.items()})


def read_rank(folder: TraceFolder, rank: int, steps: range | None = None) -> RankTrace:
    """A rank's rows of these steps, None for all. A block that was cut short by the job's end is left out.

    Raises:
        DataError: no trace file of this package, or of a machine with another byte order.
    """
    path = folder.path / rank_trace_file(rank)
    names: list[Name] = []
    found: dict[int, list[np.ndarray]] = {}
    dropped = 0
    with path.open("rb") as file:
        facts = _line(file)
        if facts is None or facts.get("columns") != list(COLUMNS) or facts.get("byteorder") != "little":
            raise DataError(f"{path} does not begin like a trace file of this version of hpc-train.")
        offset_ns, error_ns = folder.clock.get(facts["node_rank"], (0, 0))
        while (head := _line(file)) is not None:
            names += [Name(**{**name, "kind": Kind(name["kind"])}) for name in head["names"]]
            dropped = max(dropped, head["dropped"])
            num_bytes = head["rows"] * _ROW_BYTES
            if steps is not None and head["step"] not in steps:
                file.seek(num_bytes, 1)
                continue
            data = file.read(num_bytes)
            if len(data) < num_bytes:
                break
            block = np.frombuffer(data, dtype="<i8").reshape(-1, len(COLUMNS)).copy()
            block[:, 1:4] -= offset_ns
            found.setdefault(head["step"], []).append(block)
    rows = {step: np.concatenate(blocks) for step, blocks in found.items() if sum(map(len, blocks))}
    return RankTrace(rank, facts["node"], tuple(names), rows, dropped, error_ns)


def _line(file: Any) -> dict[str, Any] | None:
    """The next line's JSON; None at the end, also where the last line is not whole."""
    try:
        value = json.loads(file.readline(_LONGEST_LINE_BYTES))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def parse_ranges(text: str, what: str) -> tuple[range, ...]:
    """`0-3,8` as ranges.

    Raises:
        DataError: it is not of this form.
    """
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise DataError(f"{what} {text!r} is not understood at {part!r}; write for example 3, 0-7 or 0-3,8.")
        ranges.append(range(int(first), int(last if dash else first) + 1))
    return tuple(ranges)


def choose_ranks(folder: TraceFolder, text: str | None) -> tuple[int, ...]:
    """The ranks with files that `text` names, all without it.

    Raises:
        DataError: a rank that it names has no file.
    """
    if text is None:
        return folder.ranks
    wanted = sorted({rank for part in parse_ranges(text, "--ranks") for rank in part})
    missing = [rank for rank in wanted if rank not in folder.ranks]
    if missing:
        raise DataError(
            f"rank {missing[0]} has no file in {folder.path}; {len(folder.ranks)} ranks have one, "
            f"{folder.ranks[0]} to {folder.ranks[-1]}."
        )
    return tuple(wanted)


def quotient(amount: float | None, whole: float | None) -> float | None:
    """amount / whole; None where the whole is no positive number, since neither 0 nor infinity would be true."""
    if amount is None or whole is None or not math.isfinite(amount) or not math.isfinite(whole) or whole <= 0:
        return None
    return amount / whole


def rows_of(traces: Sequence[RankTrace]) -> Iterator[tuple[RankTrace, int, np.ndarray]]:
    for trace in traces:
        for step in sorted(trace.rows):
            yield trace, step, trace.rows[step]

"""The trace file of one rank, read back: rows of chosen steps, and what is missing of them.

A run that ends as it should closes its files; one that is killed leaves its last block cut short or not written. So a
file that ends early is read as far as it is whole, and what it lacks is told. A file whose checksums do not fit is
damaged, and refused.
"""

from __future__ import annotations

import os
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hpc_train.errors import DataError
from hpc_train.record import COLUMNS, Kind, Name, sealed_line, unsealed

_ROW_BYTES = 8 * len(COLUMNS)
_LONGEST_LINE_BYTES = 1 << 20
_FIRST_WORD = sealed_line({"columns": COLUMNS})[:10]

NO_END = "the file has no end, as of a rank that still runs or was killed; what was recorded last may be missing"
NOTHING_WHOLE = "the file has nothing whole, as of a rank that was killed at its start"


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded, on the clock of rank 0's node.

    rows: of each chosen step (n, columns), int64; a transfer is among those of the step in which the rank awaited it.
    beside: of the steps before and behind the chosen ones, for what is under way in both. num_dropped: rows of the
    whole attempt that are in no file. clock_error_ns: how wrong the times may be against rank 0's node; None where the
    offset of this node's clock is not known. missing: what the file lacks, in words; empty where it is whole.
    recorded: all steps of which the file has rows.
    """

    rank: int
    node: str
    names: tuple[Name, ...]
    rows: dict[int, np.ndarray]
    beside: dict[int, np.ndarray] = field(default_factory=dict)
    num_dropped: int = 0
    clock_error_ns: int | None = 0
    missing: str = ""
    recorded: frozenset[int] = frozenset()


def read_rank(path: Path, rank: int, clock: dict[int, tuple[int, int]], steps: range | None = None) -> RankTrace:
    """A rank's rows of these steps, None for all.

    clock: by node, the offset of its clock and how wrong that may be, in ns.

    Raises:
        DataError: no trace file of this version, a damaged one, or one that cannot be read.
    """
    try:
        with path.open("rb") as file:
            return _Reader(file, path).read(rank, clock, steps)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. {_cure(rank)}") from error


def _cure(rank: int) -> str:
    return f"Restore the file, or choose ranks without {rank} by --ranks"


class _Reader:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._size = os.fstat(file.fileno()).st_size
        self._names: list[Name] = []
        self._found: dict[int, list[np.ndarray]] = {}
        self._recorded: set[int] = set()
        self._dropped = 0

    def read(self, rank: int, clock: dict[int, tuple[int, int]], steps: range | None) -> RankTrace:
        facts = self._facts(rank)
        if facts is None:
            return RankTrace(rank, "?", (), {}, missing=NOTHING_WHOLE)
        offset_ns, error_ns = clock.get(facts["node_rank"], (0, None))
        missing = self._blocks(rank, None if steps is None else range(steps.start - 1, steps.stop + 1), offset_ns)
        rows = {step: np.concatenate(blocks) for step, blocks in self._found.items()}
        chosen = {step: of_step for step, of_step in rows.items() if steps is None or step in steps}
        beside = {step: of_step for step, of_step in rows.items() if step not in chosen}
        return RankTrace(
            rank,
            facts["node"],
            tuple(self._names),
            chosen,
            beside,
            self._dropped,
            error_ns,
            missing,
            frozenset(self._recorded),
        )

    def _facts(self, rank: int) -> dict[str, Any] | None:
        """What the first line says; None where the file ends within it."""
        line = self._file.readline(_LONGEST_LINE_BYTES)
        if not line.endswith(b"\n") and (line.startswith(_FIRST_WORD) or _FIRST_WORD.startswith(line)):
            return None
        facts = unsealed(line)
        if facts is None or facts.get("columns") != list(COLUMNS) or facts.get("byteorder") != sys.byteorder:
            raise DataError(
                f"{self._path} is damaged in its first line, or of another version of hpc-train or another kind of "
                f"machine. {_cure(rank)}"
            )
        return facts

    def _blocks(self, rank: int, steps: range | None, offset_ns: int) -> str:
        """Take the blocks of these steps, and return what is missing."""
        step, is_closed = None, False
        while line := self._file.readline(_LONGEST_LINE_BYTES):
            start = self._file.tell() - len(line)
            if not line.endswith(b"\n") and len(line) < _LONGEST_LINE_BYTES:
                behind = "its first line" if step is None else f"a block of step {step}"
                return f"the file is cut short behind {behind}; what came there is missing"
            head = unsealed(line)
            if head is None:
                raise self._damaged(start, rank)
            step, num_bytes = head["step"], head["rows"] * _ROW_BYTES
            if self._file.tell() + num_bytes > self._size:
                return (
                    f"the file is cut short in a block of step {step}; its {head['rows']} segments are left out, and "
                    "what came behind is missing"
                )
            self._names += [Name(**{**name, "kind": Kind(name["kind"])}) for name in head["names"]]
            self._dropped = max(self._dropped, head["dropped"])
            is_closed = head["rows"] == 0
            if not is_closed:
                self._recorded.add(step)
            if is_closed or (steps is not None and step not in steps):
                self._file.seek(num_bytes, os.SEEK_CUR)
                continue
            data = self._file.read(num_bytes)
            if zlib.crc32(data) != head["crc32"]:
                raise self._damaged(start, rank)
            block = np.frombuffer(data, dtype="i8").reshape(-1, len(COLUMNS)).copy()
            block[:, 1:4] -= offset_ns
            self._found.setdefault(step, []).append(block)
        return "" if is_closed else NO_END

    def _damaged(self, start: int, rank: int) -> DataError:
        what = f"the checksum of its block at byte {start} does not fit"
        return DataError(f"{self._path} is damaged: {what}. {_cure(rank)}")

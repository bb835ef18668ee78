"""Which queries and keys of a ring's members meet, as blocks of rows: attention's work in one step of a ring.

A member has its parts of all sequences one behind the other, as rows. Keys see no farther than queries of their own
sequence behind them, so of two members most pairs of parts meet as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from hpc_train.plan.batch import zigzag


@final
@dataclass(frozen=True, slots=True)
class Block:
    """Queries in rows query .. query + num_queries and keys in rows key .. key + num_keys, of one sequence.

    lead: by how much the first query is behind the first key in the sequence. Query i sees key j where j <= i + lead
    and, with a window, j > i + lead - window.
    """

    query: int
    num_queries: int
    key: int
    num_keys: int
    lead: int

    @property
    def is_diagonal(self) -> bool:
        """Whether some of its keys are behind some of its queries; queries and keys are then the same tokens."""
        return self.lead < self.num_keys - 1


@final
@dataclass(frozen=True, slots=True)
class Run:
    """Tokens start .. stop of a sequence, in rows from `row` on."""

    row: int
    start: int
    stop: int


def runs(lengths: Sequence[int], num_ranks: int, place: int) -> list[list[Run]]:
    """What the member at a place has of each sequence; two parts that touch are one run."""
    found, row = [], 0
    for length in lengths:
        of_sequence: list[Run] = []
        for start, stop in zigzag(length, num_ranks, place):
            if stop == start:
                continue
            if of_sequence and of_sequence[-1].stop == start:
                of_sequence[-1] = Run(of_sequence[-1].row, of_sequence[-1].start, stop)
            else:
                of_sequence.append(Run(row, start, stop))
            row += stop - start
        found.append(of_sequence)
    return found


def num_rows(lengths: Sequence[int], num_ranks: int, place: int) -> int:
    """Tokens that the member at a place has."""
    return sum(run.stop - run.start for of_sequence in runs(lengths, num_ranks, place) for run in of_sequence)


def ring_blocks(
    lengths: Sequence[int], num_ranks: int, place: int, key_place: int, window: int | None = None
) -> list[Block]:
    """What the queries of one member and the keys of one have in common, without queries or keys that see nothing.

    window: how many tokens a query sees, itself the last of them; None for all before it.
    """
    found = []
    of_queries, of_keys = runs(lengths, num_ranks, place), runs(lengths, num_ranks, key_place)
    for query_runs, key_runs in zip(of_queries, of_keys, strict=True):
        for query in query_runs:
            for key in key_runs:
                block = _block(query, key, window)
                if block is not None:
                    found.append(block)
    return found


def _block(query: Run, key: Run, window: int | None) -> Block | None:
    key_start, query_stop = key.start, query.stop
    if window is not None:
        key_start = max(key_start, query.start - window + 1)
        query_stop = min(query_stop, key.stop - 1 + window)
    if key_start >= min(key.stop, query_stop) or query.start >= query_stop:
        return None
    return Block(
        query.row, query_stop - query.start, key.row + key_start - key.start, key.stop - key_start,
        query.start - key_start,
    )  # fmt: skip

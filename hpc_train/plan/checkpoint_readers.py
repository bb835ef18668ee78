"""Which of the ranks that may read a part of a checkpoint reads it: nobody much more than the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_MUCH, _MOST_ROUNDS = 1.1, 8
"""A reader above so much of the mean passes parts on, so many times (measured: see docs/measurements)."""


@dataclass(frozen=True)
class Places:
    """Where ranks are: (world_size,) node and rail of each."""

    node: np.ndarray
    rail: np.ndarray


def candidates_of(
    box_of_part: np.ndarray, pair_part: np.ndarray, pair_rank: np.ndarray, num_parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """The ranks that may read each part, as one list, and where each part's begin in it: those that need some of it.

    A part that nobody needs goes to those that need another part of its box.
    """
    num_ranks = int(pair_rank.max(initial=0)) + 1
    pairs = np.sort(pair_part * num_ranks + pair_rank)
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    part, rank = np.divmod(pairs, num_ranks)
    alone = np.flatnonzero(np.bincount(part, minlength=num_parts) == 0)
    if len(alone):
        of_box = {int(box): rank[box_of_part[part] == box] for box in np.unique(box_of_part[alone])}
        part = np.concatenate([part, *(np.full(len(of_box[int(box_of_part[row])]), row) for row in alone)])
        rank = np.concatenate([rank, *(of_box[int(box_of_part[row])] for row in alone)])
        order = np.lexsort((rank, part))
        part, rank = part[order], rank[order]
    return rank, np.searchsorted(part, np.arange(num_parts + 1))


def on_its_node(
    candidates: tuple[np.ndarray, np.ndarray], node_of_part: np.ndarray, places: Places
) -> tuple[np.ndarray, np.ndarray]:
    """Of the candidates of each part those on the node where it lies; where there are none, all ranks of that node."""
    ranks, begins = candidates
    part = np.repeat(np.arange(len(node_of_part)), np.diff(begins))
    is_there = places.node[ranks] == node_of_part[part]
    ranks, part = ranks[is_there], part[is_there]
    alone = np.flatnonzero(np.bincount(part, minlength=len(node_of_part)) == 0)
    if len(alone):
        of_node = [np.flatnonzero(places.node == node) for node in range(int(places.node.max()) + 1)]
        more = [of_node[node] for node in node_of_part[alone].tolist()]
        part = np.concatenate([part, np.repeat(alone, list(map(len, more)))])
        ranks = np.concatenate([ranks, *more])
        order = np.lexsort((ranks, part))
        part, ranks = part[order], ranks[order]
    return ranks, np.searchsorted(part, np.arange(len(node_of_part) + 1))


class _Choice:
    """Readers of parts that several ranks may read, and what ranks, nodes and rails have to read so far.

    reader: by part; None where nothing is chosen yet.
    """

    def __init__(
        self, reader: list[int | None], by_rank: np.ndarray, candidates: tuple[np.ndarray, np.ndarray], places: Places
    ) -> None:
        self.reader = reader
        self._ranks, self._begins = candidates[0].tolist(), candidates[1]
        self._node, self._rail = places.node.tolist(), places.rail.tolist()
        self.of_rank = by_rank.tolist()
        self._of_node = _sums(places.node, by_rank).tolist()
        self._of_rail = _sums(places.rail, by_rank).tolist()

    def settle(self, parts: np.ndarray, part_bytes: np.ndarray) -> bool:
        """Give each part to the rank with least to read, then the one on the node, then on the rail that has.

        A part that has a reader moves only where it makes the busier of both less busy. Returns whether any has moved.
        """
        # One loop without calls: for 12,288 ranks it runs 500,000 times, and calls took two thirds of it (measured).
        ranks, reader, node, rail = self._ranks, self.reader, self._node, self._rail
        of_rank, of_node, of_rail = self.of_rank, self._of_node, self._of_rail
        is_moved = False
        columns = (parts, self._begins[parts], self._begins[parts + 1], part_bytes[parts])
        for part, begin, end, num_bytes in zip(*(column.tolist() for column in columns), strict=True):
            best = ranks[begin]
            lowest = of_rank[best]
            for place in range(begin + 1, end):
                rank = ranks[place]
                load = of_rank[rank]
                if load < lowest or (
                    load == lowest
                    and (of_node[node[rank]], of_rail[rail[rank]]) < (of_node[node[best]], of_rail[rail[best]])
                ):
                    best, lowest = rank, load
            before = reader[part]
            if before is not None:
                if lowest + num_bytes >= of_rank[before]:
                    continue
                of_rank[before] -= num_bytes
                of_node[node[before]] -= num_bytes
                of_rail[rail[before]] -= num_bytes
            reader[part], is_moved = best, True
            of_rank[best] += num_bytes
            of_node[node[best]] += num_bytes
            of_rail[rail[best]] += num_bytes
        return is_moved


def choose_readers(part_bytes: np.ndarray, candidates: tuple[np.ndarray, np.ndarray], places: Places) -> np.ndarray:
    """A reader for each part: first where there is no choice, then the largest first, each to who has least to read.

    Then ranks that have much more than the mean pass some on.
    """
    ranks, begins = candidates
    is_free = np.diff(begins) > 1
    only = ranks[begins[:-1]]
    by_rank = _sums(only[~is_free], part_bytes[~is_free], len(places.node))
    reader: list[int | None] = only.tolist()
    free = np.flatnonzero(is_free)
    free = free[np.argsort(-part_bytes[free], kind="stable")]
    for part in free.tolist():
        reader[part] = None
    choice = _Choice(reader, by_rank, candidates, places)
    choice.settle(free, part_bytes)
    much = _MUCH * part_bytes.sum() / len(places.node)
    for _ in range(_MOST_ROUNDS):
        chosen = np.array(choice.reader, dtype=np.int64)
        is_busy = np.array(choice.of_rank)[chosen[free]] > much
        if not choice.settle(free[is_busy], part_bytes):
            break
    return np.array(choice.reader, dtype=np.int64)


def _sums(index: np.ndarray, num_bytes: np.ndarray, length: int = 0) -> np.ndarray:
    """Bytes by index, as whole numbers."""
    return np.bincount(index, weights=num_bytes, minlength=length).astype(np.int64)

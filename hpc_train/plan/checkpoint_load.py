"""Who reads which bytes of a checkpoint, and from rank to rank over whom they go. Pure arithmetic.

Each stored byte is read once: by a rank that needs it itself, of several the one that has least to read so far, then
the one on the node and on the rail that has. What one node alone has is read by a rank of that node. A box larger than
a part of a rank's fair share is read in parts by several ranks. What is read goes on in chunks. Ranks that need the
same box of a chunk get it one from the other: so the reader sends it once however many they are, each node is entered
once, and nothing needs a group of its own.

All ranks go through the chunks in one order: the first of each reader, then the second of each, and so on. What a rank
waits for is therefore always earlier in that order than what it still has to do, and no circle can form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hpc_train.plan.flat import Box

CHUNK_BYTES = 8 << 20
"""Most that is read and sent at once; a rank holds about ten of them (assumed: a store's round trip is far shorter)."""
_PARTS_A_SHARE = 16
"""A box above this part of a rank's fair share is cut. Measured on 12,288 ranks: with 4 the busiest reader of another
mesh's checkpoint had 1.85 of the mean."""
_MUCH, _MOST_ROUNDS = 1.1, 8
"""A reader above so much of the mean passes parts on, so many times (measured: see docs/measurements)."""
_PAIRS_AT_ONCE = 1 << 20
"""Boxes compared in one go: some 100 bytes each."""


@dataclass(frozen=True)
class BoxTable:
    """Boxes of many tensors, a row each.

    tensor: (n,), which tensor. offsets, sizes: (n, d); tensors of fewer dimensions are filled up with 0 and 1 at the
    end. num_dims: (n,), of the tensor itself.
    """

    tensor: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    num_dims: np.ndarray

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def num_elements(self) -> np.ndarray:
        # Dimension by dimension: NumPy's products along a short axis take three times as long.
        elements = np.ones(len(self), dtype=np.int64)
        for dim in range(self.sizes.shape[1]):
            elements *= self.sizes[:, dim]
        return elements

    def rows(self, index: np.ndarray) -> BoxTable:
        """Some of the rows, in the order given."""
        return BoxTable(self.tensor[index], self.offsets[index], self.sizes[index], self.num_dims[index])

    def box(self, row: int) -> Box:
        count = int(self.num_dims[row])
        return Box(tuple(self.offsets[row, :count].tolist()), tuple(self.sizes[row, :count].tolist()))


@dataclass(frozen=True)
class Places:
    """Where ranks are: (world_size,) node and rail of each."""

    node: np.ndarray
    rail: np.ndarray


@dataclass(frozen=True)
class Chunk:
    """What a rank reads at once: `box` of its tensor lies in the stored box behind its first `skipped` elements."""

    part: int
    number: int
    box: Box
    skipped: int


@dataclass(frozen=True)
class Delivery:
    """A box of a chunk on its way.

    ranks: the reader, then those that need it, each of which gets it from the one before. needed: this rank's rows of
    the needs that it fills.
    """

    chunk: Chunk
    box: Box
    ranks: tuple[int, ...]
    needed: tuple[int, ...]


@dataclass(frozen=True)
class LoadPlan:
    """The plan of a whole load, equal on all ranks.

    stored, needed: as given. box_of_part: (p,), row of `stored`. parts: (p,) boxes, each a run of its stored box's
    bytes. reader: (p,) rank. pair_part, pair_need: which parts and needs share elements, by part. gaps: rows of
    `needed` that the stored boxes do not fill exactly.
    """

    stored: BoxTable
    item_bytes: np.ndarray
    needed: BoxTable
    holder: np.ndarray
    places: Places
    chunk_bytes: int
    box_of_part: np.ndarray
    parts: BoxTable
    reader: np.ndarray
    pair_part: np.ndarray
    pair_need: np.ndarray
    gaps: np.ndarray

    @cached_property
    def part_bytes(self) -> np.ndarray:
        return self.parts.num_elements * self.item_bytes[self.box_of_part]

    @property
    def bytes_read(self) -> np.ndarray:
        """By rank, what it reads from the store."""
        return np.bincount(self.reader, weights=self.part_bytes, minlength=len(self.places.node)).astype(np.int64)

    def read_by(self, rank: int) -> list[Chunk]:
        """All that a rank reads, in that order."""
        parts = np.flatnonzero(self.reader == rank).tolist()
        return [chunk for part in parts for chunk in self._chunks(part)]

    def deliveries(self, rank: int) -> list[Delivery]:
        """All that a rank reads, gets or passes on, in the order that all ranks share."""
        is_mine = self.reader == rank
        is_mine[self.pair_part[self.holder[self.pair_need] == rank]] = True
        found = []
        for part in np.flatnonzero(is_mine).tolist():
            reader, first = int(self.reader[part]), int(self._first_chunk[part])
            for chunk in self._chunks(part):
                for place, (box, needed) in enumerate(self._shared(chunk)):
                    ranks = self._chain(reader, {int(self.holder[row]) for row in needed})
                    if rank in ranks:
                        own = tuple(row for row in needed if self.holder[row] == rank)
                        found.append(((first + chunk.number, reader, place), Delivery(chunk, box, ranks, own)))
        return [delivery for _, delivery in sorted(found, key=lambda item: item[0])]

    def _shared(self, chunk: Chunk) -> list[tuple[Box, list[int]]]:
        """The boxes of a chunk that are needed, and by which rows; the same list on every rank."""
        first, last = self._first_pair[chunk.part], self._first_pair[chunk.part + 1]
        by_box: dict[Box, list[int]] = {}
        for row in self.pair_need[first:last].tolist():
            shared = chunk.box.intersection(self.needed.box(row))
            if shared is not None:
                by_box.setdefault(shared, []).append(row)
        return sorted(by_box.items(), key=lambda item: (item[0].offsets, item[0].sizes))

    def _chain(self, reader: int, ranks: set[int]) -> tuple[int, ...]:
        """The reader's node first, then node by node."""
        node = self.places.node
        count = int(node.max()) + 1
        others = sorted(ranks - {reader}, key=lambda rank: (int(node[rank] - node[reader]) % count, rank))
        return (reader, *others)

    def _chunks(self, part: int) -> Iterator[Chunk]:
        row = int(self.box_of_part[part])
        most = max(1, self.chunk_bytes // int(self.item_bytes[row]))
        whole, box = self.stored.box(row), self.parts.box(part)
        # Parts of a box are runs of its bytes, so its elements before this one are a number.
        skipped = _place_in(whole, box.offsets)
        for number, chunk in enumerate(chunks_of(box, most)):
            yield Chunk(part, number, chunk, skipped)
            skipped += chunk.num_elements

    @cached_property
    def _first_pair(self) -> list[int]:
        return np.searchsorted(self.pair_part, np.arange(len(self.parts) + 1)).tolist()

    @cached_property
    def _first_chunk(self) -> np.ndarray:
        """By part, how many chunks its reader reads before it."""
        count = num_chunks(self.parts.sizes, np.maximum(1, self.chunk_bytes // self.item_bytes[self.box_of_part]))
        order = np.argsort(self.reader, kind="stable")
        before = np.cumsum(count[order]) - count[order]
        reader = self.reader[order]
        begins = np.searchsorted(reader, reader)
        first = np.empty_like(before)
        first[order] = before - before[begins]
        return first


def plan_load(
    stored: BoxTable,
    item_bytes: np.ndarray,
    needed: BoxTable,
    holder: np.ndarray,
    places: Places,
    chunk_bytes: int = CHUNK_BYTES,
    lies_on: np.ndarray | None = None,
) -> LoadPlan:
    """Plan who reads what, and over whom it goes.

    Args:
        stored: The boxes of a checkpoint, in the order in which they lie in its files.
        item_bytes: (len(stored),), bytes of an element.
        needed: What ranks hold and want filled. A rank may need a box several times, ranks may need the same.
        holder: (len(needed),), the rank of each.
        places: Where ranks are.
        chunk_bytes: Most that is read and sent at once.
        lies_on: (len(stored),), the only node that has each; None: every node sees all. Ranks of that node read it,
            whether they need it or not.
    """
    is_wanted = np.zeros(1 + int(stored.tensor.max(initial=-1)), dtype=bool)
    is_wanted[needed.tensor] = True
    is_wanted = is_wanted[stored.tensor]
    box_bytes = stored.num_elements * item_bytes
    share = int(box_bytes[is_wanted].sum()) // (len(places.node) * _PARTS_A_SHARE)
    parts, box_of_part = _cut(stored, box_bytes, max(chunk_bytes, share), is_wanted)
    pair_part, pair_need, shared = _overlaps(parts, needed)
    # A box's checksum needs all of it, so of a box that is needed in part every part is read.
    box_is_needed = np.bincount(box_of_part[pair_part], minlength=len(stored)) > 0
    is_read = np.flatnonzero(box_is_needed[box_of_part])
    if len(is_read) < len(parts):
        pair_part = np.searchsorted(is_read, pair_part)
        parts, box_of_part = parts.rows(is_read), box_of_part[is_read]
    part_bytes = parts.num_elements * item_bytes[box_of_part]
    candidates = _candidates(box_of_part, pair_part, holder[pair_need], len(parts))
    if lies_on is not None:
        candidates = _on_its_node(candidates, lies_on[box_of_part], places)
    reader = _choose_readers(part_bytes, candidates, places)
    filled = np.bincount(pair_need, weights=shared, minlength=len(needed))
    gaps = np.flatnonzero(filled != needed.num_elements)
    return LoadPlan(
        stored, item_bytes, needed, holder, places, chunk_bytes, box_of_part, parts, reader, pair_part, pair_need, gaps
    )  # fmt: skip


def chunks_of(box: Box, most_elements: int) -> Iterator[Box]:
    """Cut a box into boxes of at most so many elements that follow each other in its row-major order."""
    if not box.sizes or box.num_elements <= most_elements:
        yield box
        return
    inner = box.num_elements // box.sizes[0]
    rows = max(1, most_elements // inner)
    for first in range(0, box.sizes[0], rows):
        count = min(rows, box.sizes[0] - first)
        below = Box(box.offsets[1:], box.sizes[1:])
        for part in chunks_of(below, most_elements) if inner > most_elements else [below]:
            yield Box((box.offsets[0] + first, *part.offsets), (count, *part.sizes))


def num_chunks(sizes: np.ndarray, most_elements: np.ndarray) -> np.ndarray:
    """How many `chunks_of` gives, for (n, d) sizes at once."""
    count = np.ones(len(sizes), dtype=np.int64)
    inner = np.ones(len(sizes), dtype=np.int64)
    for dim in reversed(range(sizes.shape[1])):
        rows = np.maximum(1, most_elements // inner)
        count = np.where(inner > most_elements, sizes[:, dim] * count, -(-sizes[:, dim] // rows))
        inner = inner * sizes[:, dim]
    return count


def _place_in(outer: Box, offsets: Sequence[int]) -> int:
    """Elements of a box before a place, in row-major order."""
    place = 0
    for offset, base, size in zip(offsets, outer.offsets, outer.sizes, strict=True):
        place = place * size + (offset - base)
    return place


def _cut(
    stored: BoxTable, box_bytes: np.ndarray, most_bytes: int, is_wanted: np.ndarray
) -> tuple[BoxTable, np.ndarray]:
    """Cut boxes along their first dimension above 1 into parts of about `most_bytes`; the row of each part's box."""
    every = np.arange(len(stored))
    is_large = is_wanted & (box_bytes > most_bytes)
    if not is_large.any():
        box = every[is_wanted]
        return stored.rows(box) if len(box) < len(stored) else stored, box
    lead = np.zeros(len(stored), dtype=np.int64)
    for dim in reversed(range(stored.sizes.shape[1])):
        lead[stored.sizes[:, dim] > 1] = dim
    rows = stored.sizes[every, lead]
    rows_a_part = np.where(is_large, np.maximum(1, most_bytes // np.maximum(1, box_bytes // np.maximum(1, rows))), rows)
    rows_a_part = np.maximum(1, rows_a_part)
    count = np.where(is_wanted, -(-rows // rows_a_part), 0)
    box = np.repeat(every, count)
    first = (np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)) * rows_a_part[box]
    parts = stored.rows(box)
    each, along = np.arange(len(box)), lead[box]
    parts.offsets[each, along] += first
    parts.sizes[each, along] = np.minimum(rows_a_part[box], rows[box] - first)
    return parts, box


def _overlaps(parts: BoxTable, needed: BoxTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of both tables whose boxes share elements, ascending by part, and how many each pair shares.

    All elements of all tensors are numbered row-major, one tensor behind the other. Boxes that share an element have
    ranges of numbers that overlap, and there are few others of which that is true; these are compared one by one.
    """
    (low, high), (need_low, need_high) = _number_ranges(parts, needed)
    by_low = np.argsort(need_low, kind="stable")
    # Of the needs in this order, those before `first` end before a part begins, those from `stop` on begin behind it.
    first = np.searchsorted(np.maximum.accumulate(need_high[by_low]), low, side="left")
    stop = np.searchsorted(need_low[by_low], high, side="right")
    count = np.maximum(0, stop - first)
    ends = np.cumsum(count)
    part_sides, need_sides = _sides(parts), _sides(needed)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = [(np.empty(0, np.int64),) * 3]
    begin = 0
    while begin < len(parts):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + _PAIRS_AT_ONCE, side="right")))
        part = np.repeat(np.arange(begin, end), count[begin:end])
        need = by_low[np.arange(before, before + len(part)) + (first - ends + count)[part]]
        shared = np.ones(len(part), dtype=np.int64)
        for (starts, stops), (need_starts, need_stops) in zip(part_sides, need_sides, strict=True):
            extent = np.minimum(stops[part], need_stops[need]) - np.maximum(starts[part], need_starts[need])
            shared *= np.maximum(0, extent)
        some = shared > 0
        found.append((part[some], need[some], shared[some]))
        begin = end
    part, need, shared = map(np.concatenate, zip(*found, strict=True))
    return part, need, shared


def _sides(table: BoxTable) -> list[tuple[np.ndarray, np.ndarray]]:
    """By dimension where each box begins and stops, in arrays that are quick to look up."""
    stops = table.offsets + table.sizes
    dims = range(stops.shape[1])
    return [(np.ascontiguousarray(table.offsets[:, dim]), np.ascontiguousarray(stops[:, dim])) for dim in dims]


def _number_ranges(*tables: BoxTable) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first and the last number of each box, with all elements of all tensors numbered one behind the other."""
    num_tensors = max((int(table.tensor.max(initial=-1)) + 1 for table in tables), default=0)
    extents = np.ones((num_tensors, tables[0].offsets.shape[1]), dtype=np.int64)
    for table in tables:
        for dim in range(extents.shape[1]):
            np.maximum.at(extents[:, dim], table.tensor, table.offsets[:, dim] + table.sizes[:, dim])
    begins = np.cumsum(extents.prod(axis=1)) - extents.prod(axis=1)
    ranges = []
    for table in tables:
        low = high = np.zeros(len(table), dtype=np.int64)
        for dim in range(extents.shape[1]):
            low = low * extents[:, dim][table.tensor] + table.offsets[:, dim]
            high = high * extents[:, dim][table.tensor] + table.offsets[:, dim] + table.sizes[:, dim] - 1
        ranges.append((low + begins[table.tensor], high + begins[table.tensor]))
    return ranges


def _candidates(
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


def _on_its_node(
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


def _choose_readers(part_bytes: np.ndarray, candidates: tuple[np.ndarray, np.ndarray], places: Places) -> np.ndarray:
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

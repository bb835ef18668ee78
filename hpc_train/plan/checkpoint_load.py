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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hpc_train.plan.box_table import BoxTable, chunks_of, cut_boxes, num_chunks, overlaps, place_in
from hpc_train.plan.checkpoint_readers import Places, candidates_of, choose_readers, on_its_node
from hpc_train.plan.flat import Box

CHUNK_BYTES = 8 << 20
"""Most that is read and sent at once; a rank holds about ten of them (assumed: a store's round trip is far shorter)."""
_PARTS_A_SHARE = 16
"""A box above this part of a rank's fair share is cut. Measured on 12,288 ranks: with 4 the busiest reader of another
mesh's checkpoint had 1.85 of the mean."""


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
        skipped = place_in(whole, box.offsets)
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
    num_alike: int = 1,
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
        num_alike: Of how many runs of the same boxes both tables consist, such as weights and their moments.
    """
    is_wanted = np.zeros(1 + int(stored.tensor.max(initial=-1)), dtype=bool)
    is_wanted[needed.tensor] = True
    is_wanted = is_wanted[stored.tensor]
    box_bytes = stored.num_elements * item_bytes
    share = int(box_bytes[is_wanted].sum()) // (len(places.node) * _PARTS_A_SHARE)
    parts, box_of_part = cut_boxes(stored, box_bytes, max(chunk_bytes, share), is_wanted)
    pair_part, pair_need, shared = overlaps(parts, needed, num_alike)
    # A box's checksum needs all of it, so of a box that is needed in part every part is read.
    box_is_needed = np.bincount(box_of_part[pair_part], minlength=len(stored)) > 0
    is_read = np.flatnonzero(box_is_needed[box_of_part])
    if len(is_read) < len(parts):
        pair_part = np.searchsorted(is_read, pair_part)
        parts, box_of_part = parts.rows(is_read), box_of_part[is_read]
    part_bytes = parts.num_elements * item_bytes[box_of_part]
    candidates = candidates_of(box_of_part, pair_part, holder[pair_need], len(parts))
    if lies_on is not None:
        candidates = on_its_node(candidates, lies_on[box_of_part], places)
    reader = choose_readers(part_bytes, candidates, places)
    filled = np.bincount(pair_need, weights=shared, minlength=len(needed))
    gaps = np.flatnonzero(filled != needed.num_elements)
    return LoadPlan(
        stored, item_bytes, needed, holder, places, chunk_bytes, box_of_part, parts, reader, pair_part, pair_need, gaps
    )  # fmt: skip

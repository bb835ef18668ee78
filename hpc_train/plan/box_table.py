"""Many boxes of many tensors as columns: cut into parts and chunks, and compared with one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpc_train.plan.flat import Box

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


def place_in(outer: Box, offsets: Sequence[int]) -> int:
    """Elements of a box before a place, in row-major order."""
    place = 0
    for offset, base, size in zip(offsets, outer.offsets, outer.sizes, strict=True):
        place = place * size + (offset - base)
    return place


def cut_boxes(
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


def overlaps(parts: BoxTable, needed: BoxTable, num_alike: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of both tables whose boxes share elements, ascending by part, and how many each pair shares.

    All elements of all tensors are numbered row-major, one tensor behind the other. Boxes that share an element have
    ranges of numbers that overlap, and there are few others of which that is true; these are compared one by one.

    num_alike: both tables consist of so many runs of the same boxes, each of tensors of its own; one run is compared.
    """
    if num_alike > 1:
        num_parts, num_needed = len(parts) // num_alike, len(needed) // num_alike
        part, need, shared = overlaps(parts.rows(np.arange(num_parts)), needed.rows(np.arange(num_needed)))
        run = np.repeat(np.arange(num_alike), len(part))
        times = num_alike
        return np.tile(part, times) + run * num_parts, np.tile(need, times) + run * num_needed, np.tile(shared, times)
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

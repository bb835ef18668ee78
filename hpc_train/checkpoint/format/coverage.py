"""Whether boxes make up a tensor, each element of it once. Needs neither torch nor NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from hpc_train.plan.flat import Box


def coverage_fault(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Why the boxes do not cover a tensor of this shape exactly once; None where they do."""
    for box in boxes:
        if any(low < 0 or low + size > extent for low, size, extent in zip(box.offsets, box.sizes, shape, strict=True)):
            return f"a piece of sizes {list(box.sizes)} at {list(box.offsets)} is not within {list(shape)}"
    covered, whole = sum(box.num_elements for box in boxes), Box((), shape).num_elements
    if covered != whole:
        return f"the ranks' pieces hold {covered} elements of {whole}"
    twice = first_overlap([box for box in boxes if box.num_elements])
    if twice is not None:
        return f"pieces of sizes {' and '.join(f'{list(box.sizes)} at {list(box.offsets)}' for box in twice)} overlap"
    return None


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None. No box may be empty.

    Groups are cut where no box of theirs reaches across, in one dimension after the other, until each box is alone.
    Boxes that no such cut separates are compared with each other; those of meshes and flat ranges are all separated, in
    8 us each (measured, beside other work).
    """
    waiting = [(list(boxes), 0, 0)]
    while waiting:
        group, dim, num_vain = waiting.pop()
        if len(group) < 2:
            continue
        num_dims = len(group[0].sizes)
        if num_vain == num_dims:
            found = next((pair for pair in combinations(group, 2) if pair[0].intersection(pair[1]) is not None), None)
            if found is not None:
                return found
            continue
        parts = _cut(group, dim)
        num_vain = num_vain + 1 if len(parts) == 1 else 0
        waiting += [(part, (dim + 1) % num_dims, num_vain) for part in parts]
    return None


def _cut(boxes: list[Box], dim: int) -> list[list[Box]]:
    """The boxes in groups between which no box reaches across, in this dimension."""
    parts: list[list[Box]] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        if not parts or box.offsets[dim] >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, box.offsets[dim] + box.sizes[dim])
    return parts

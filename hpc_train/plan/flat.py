"""Where parameters lie in one flat buffer that is cut into equal shards, and which boxes a range of it is.

A flat range cuts a parameter anywhere. As a part of the parameter's own shape it is at most 2d - 1 boxes for
d dimensions: the rest of a started row, whole rows, the start of a row, and so on inwards. Checkpoints store
such boxes under global names and shapes, so another mesh can read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Shards begin on a multiple of this many elements, so that vector loads are aligned (derived: 64 bytes of fp32).
ALIGNMENT = 16


@dataclass(frozen=True)
class Box:
    """A block of a tensor: offsets and sizes by dimension. A scalar has neither."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return _product(self.sizes)

    def intersection(self, other: Box) -> Box | None:
        """The part that two boxes of one tensor share, or None."""
        lows = tuple(map(max, self.offsets, other.offsets))
        highs = (
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(high - low for low, high in zip(lows, highs, strict=True))
        return Box(lows, sizes) if all(size > 0 for size in sizes) else None

    def slices_within(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in an array that holds `outer`, which must contain it."""
        return tuple(
            slice(low - base, low - base + size)
            for low, size, base in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )


@dataclass(frozen=True)
class FlatParameter:
    """One parameter's place: elements start .. start + prod(shape) of the flat buffer."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_elements(self) -> int:
        return _product(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.num_elements


@dataclass(frozen=True)
class FlatPiece:
    """The part of a parameter that lies in a shard: a box, and where its elements begin in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int


@dataclass(frozen=True)
class FlatLayout:
    """Parameters one behind the other, padded at the end to num_shards equal shards."""

    parameters: tuple[FlatParameter, ...]
    num_shards: int

    @property
    def num_elements(self) -> int:
        return self.parameters[-1].stop if self.parameters else 0

    @property
    def shard_elements(self) -> int:
        """Elements of each shard, padding included."""
        step = self.num_shards * ALIGNMENT
        return -(-self.num_elements // step) * ALIGNMENT

    @property
    def padded_elements(self) -> int:
        return self.shard_elements * self.num_shards

    def shard_range(self, shard: int) -> tuple[int, int]:
        """First and last + 1 element of a shard, padding included."""
        return shard * self.shard_elements, (shard + 1) * self.shard_elements

    def pieces(self, shard: int) -> Iterator[FlatPiece]:
        """The boxes that a shard holds, in the order of the flat buffer."""
        start, stop = self.shard_range(shard)
        for parameter in self.parameters:
            first, last = max(start, parameter.start), min(stop, parameter.stop)
            if first >= last:
                continue
            place = first
            for box in boxes_of_range(parameter.shape, first - parameter.start, last - parameter.start):
                yield FlatPiece(parameter.name, parameter.shape, box, place)
                place += box.num_elements


def lay_out(shapes: Sequence[tuple[str, tuple[int, ...]]], num_shards: int) -> FlatLayout:
    """Place parameters in the order given."""
    parameters = []
    start = 0
    for name, shape in shapes:
        parameters.append(FlatParameter(name, tuple(shape), start))
        start = parameters[-1].stop
    return FlatLayout(tuple(parameters), num_shards)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut elements start .. stop of a row-major tensor into at most 2d - 1 boxes, in element order.

    Raises:
        ValueError: the range is empty or leaves the tensor.
    """
    total = _product(shape)
    if not 0 <= start < stop <= total:
        raise ValueError(f"elements {start}..{stop} are not a range of a tensor of shape {tuple(shape)}")
    if not shape:
        return [Box((), ())]
    row = total // shape[0]
    first, last = start // row, -(-stop // row)
    whole_first, whole_last = -(-start // row), stop // row
    if last - first == 1 and not whole_first < whole_last:
        return _prefixed(first, boxes_of_range(shape[1:], start - first * row, stop - first * row))
    boxes: list[Box] = []
    if start < whole_first * row:
        boxes += _prefixed(first, boxes_of_range(shape[1:], start - first * row, row))
    if whole_first < whole_last:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(Box((whole_first, *zeros), (whole_last - whole_first, *shape[1:])))
    if whole_last * row < stop:
        boxes += _prefixed(whole_last, boxes_of_range(shape[1:], 0, stop - whole_last * row))
    return boxes


def _prefixed(index: int, boxes: list[Box]) -> list[Box]:
    return [Box((index, *box.offsets), (1, *box.sizes)) for box in boxes]


def _product(extents: Sequence[int]) -> int:
    product = 1
    for extent in extents:
        product *= extent
    return product

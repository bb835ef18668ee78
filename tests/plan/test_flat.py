"""Flat buffers, their shards, and the boxes that a range of a tensor is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.plan.flat import ALIGNMENT, Box, boxes_of_range, lay_out

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_of_a_range_hold_its_elements_in_order_and_are_few(shape, data):
    total = int(np.prod(shape, dtype=int))
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    numbers = np.arange(total).reshape(shape)
    boxes = boxes_of_range(shape, start, stop)
    found = [numbers[box.slices_within(Box((0,) * len(shape), shape))].ravel() for box in boxes]
    assert list(itertools.chain(*found)) == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 2), (-1, 2), (0, 13)])
def test_a_range_outside_the_tensor_is_refused(start, stop):
    with pytest.raises(ValueError, match="not a range"):
        boxes_of_range((3, 4), start, stop)


@given(st.lists(shapes, min_size=1, max_size=6), st.integers(1, 9))
def test_shards_are_equal_aligned_and_their_pieces_cover_every_parameter_once(tensor_shapes, num_shards):
    layout = lay_out([(f"p{i}", shape) for i, shape in enumerate(tensor_shapes)], num_shards)
    assert layout.shard_elements % ALIGNMENT == 0
    assert layout.padded_elements >= layout.num_elements
    covered = {f"p{i}": np.zeros(shape, dtype=int) for i, shape in enumerate(tensor_shapes)}
    for shard in range(num_shards):
        start, stop = layout.shard_range(shard)
        for piece in layout.pieces(shard):
            assert start <= piece.start < piece.start + piece.box.num_elements <= stop
            whole = Box((0,) * len(piece.shape), piece.shape)
            covered[piece.name][piece.box.slices_within(whole)] += 1
    assert all((count == 1).all() for count in covered.values())


@given(st.data())
def test_intersection_is_what_two_boxes_share(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    boxes = []
    for _ in range(2):
        lows = [data.draw(st.integers(0, extent - 1)) for extent in shape]
        sizes = [data.draw(st.integers(1, extent - low)) for low, extent in zip(lows, shape, strict=True)]
        boxes.append(Box(tuple(lows), tuple(sizes)))
    whole = Box((0,) * len(shape), tuple(shape))
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        count[box.slices_within(whole)] += 1
    shared = boxes[0].intersection(boxes[1])
    assert (0 if shared is None else shared.num_elements) == (count == 2).sum()

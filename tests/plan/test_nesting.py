"""Orders of blocks and of parts, by themselves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.plan.mesh import Mesh
from hpc_train.plan.nesting import Piece, aligned_order, fill_order, nestings, whole_axes

degrees = st.integers(1, 5)


@given(st.builds(Mesh, pp=degrees, dp=degrees, cp=degrees, tp=st.just(2)), st.booleans(), st.integers(1, 8))
def test_every_nesting_lists_every_block_once(mesh: Mesh, is_snake: bool, host_size: int) -> None:
    for pieces in itertools.islice(nestings(mesh), 60):
        order = fill_order(mesh, pieces, is_snake=is_snake, host_size=host_size)
        assert sorted(order.tolist()) == list(range(mesh.world_size // 2))


def test_whole_axes_are_nested_as_they_are_listed() -> None:
    mesh = Mesh(pp=2, dp=3, cp=1, tp=4)
    assert fill_order(mesh, whole_axes(mesh, ("cp", "dp", "pp"))).tolist() == [0, 1, 2, 3, 4, 5]
    assert fill_order(mesh, whole_axes(mesh, ("cp", "pp", "dp"))).tolist() == [0, 3, 1, 4, 2, 5]


def test_a_snake_turns_and_runs_are_filled_one_after_another() -> None:
    mesh = Mesh(pp=2, dp=4, cp=1, tp=1)
    assert fill_order(mesh, whole_axes(mesh, ("dp", "pp")), is_snake=True).tolist() == [0, 1, 2, 3, 7, 6, 5, 4]
    tiles = (Piece("dp", 1, 2), Piece("pp", 1, 2), Piece("dp", 2, 2))
    assert fill_order(mesh, tiles).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_inside_hosts_a_ring_is_folded_so_that_neighbours_in_two_hosts_share_a_slot() -> None:
    mesh = Mesh(pp=1, dp=8, cp=1, tp=1)
    order = fill_order(mesh, whole_axes(mesh, ("dp",)), host_size=2)
    slot = np.empty(8, np.int64)
    slot[order] = np.arange(8) % 2
    host = np.empty(8, np.int64)
    host[order] = np.arange(8) // 2
    for block in range(8):
        other = (block + 1) % 8
        assert host[block] == host[other] or slot[block] == slot[other]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(2, 40), st.integers(0, 100))
def test_an_aligned_order_has_every_part_once(sizes: list[int], unit: int, start: int) -> None:
    assert sorted(aligned_order(sizes, unit, start)) == list(range(len(sizes)))


@pytest.mark.parametrize(
    ("sizes", "unit", "start", "borders"),
    [
        ([5, 8, 3], 8, 0, {8, 16}),
        ([6, 5, 1, 3], 16, 6, {16}),
        ([5, 5, 3, 6, 2], 7, 0, {7, 21}),
        ([1] * 30 + [6] * 30, 7, 0, {7 * count for count in range(1, 31)}),
    ],
)
def test_borders_fall_on_multiples_where_parts_can_be_joined_to_them(
    sizes: list[int], unit: int, start: int, borders: set[int]
) -> None:
    ends = start + np.cumsum([sizes[part] for part in aligned_order(sizes, unit, start)])
    assert borders <= {*ends.tolist()}

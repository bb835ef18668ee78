from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.errors import ConfigError
from hpc_train.plan.mesh import AXES, MAX_RANKS, Mesh

degrees = st.integers(min_value=1, max_value=5)
meshes = st.builds(Mesh, pp=degrees, dp=degrees, cp=degrees, tp=degrees)


@given(meshes)
def test_coordinates_and_ranks_are_inverse_and_row_major(mesh: Mesh) -> None:
    places = [tuple(mesh.coords(rank).values()) for rank in range(mesh.world_size)]
    assert places == sorted(set(places))
    assert [mesh.rank_of(**mesh.coords(rank)) for rank in range(mesh.world_size)] == list(range(mesh.world_size))


@given(meshes, st.sampled_from(AXES))
def test_groups_of_an_axis_hold_every_rank_once_and_differ_in_that_axis_only(mesh: Mesh, axis: str) -> None:
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    for group in groups:
        assert [mesh.coords(rank)[axis] for rank in group] == list(range(getattr(mesh, axis)))
        others = {tuple(place for name, place in mesh.coords(rank).items() if name != axis) for rank in group}
        assert len(others) == 1
        assert mesh.group_of(group[-1], axis) == group


def test_tp_varies_fastest() -> None:
    mesh = Mesh(pp=2, dp=2, cp=1, tp=2)
    assert mesh.groups("tp")[0] == (0, 1)
    assert mesh.groups("pp")[0] == (0, 4)
    assert mesh.coords(5) == {"pp": 1, "dp": 0, "cp": 0, "tp": 1}


@pytest.mark.parametrize(
    ("world_size", "asked", "dp"),
    [
        (8, {"tp": 4}, 2),
        (8, {"tp": 4, "dp": 2}, 2),
        (1, {}, 1),
        (9, {"tp": 1}, 9),
        (16, {"pp": 2, "cp": 2, "tp": 4}, 1),
        (16384, {"pp": 16, "tp": 8}, 128),
    ],
)
def test_the_data_parallel_degree_is_what_the_other_axes_leave(world_size: int, asked: dict[str, int], dp: int) -> None:
    """FC-57"""
    mesh = Mesh.fill(world_size, **asked)
    assert (mesh.dp, mesh.world_size) == (dp, world_size)


@pytest.mark.parametrize(
    ("world_size", "asked", "words"),
    [
        (9, {"tp": 2}, ["9 ranks", "tp 2", "remainder of 1", "8 or 10 ranks", "tp=1"]),
        (8, {"tp": 3}, ["8 ranks", "tp 3", "remainder of 2", "6 or 9 ranks", "tp=1 or 2 or 4"]),
        (8, {"dp": 3}, ["8 ranks", "dp 3", "= 3 ranks", "5 left over", "dp=8"]),
        (4, {"dp": 8}, ["4 ranks", "dp 8", "4 missing", "Start 8 ranks", "dp=4"]),
        (2, {"pp": 4}, ["2 ranks", "pp 4", "remainder of 2", "With these degrees use 4 ranks", "pp=1 or 2"]),
        (10, {"dp": 3, "pp": 4}, ["12 ranks", "2 missing", "8 or 12 ranks"]),
        (0, {}, ["0 ranks"]),
        (4, {"tp": 0}, ["tp=0"]),
        (4, {"dp": 0}, ["dp=0"]),
    ],
)
def test_a_world_that_the_axes_do_not_fill_is_refused_with_the_nearest_choices(
    world_size: int, asked: dict[str, int], words: list[str]
) -> None:
    """FC-57"""
    with pytest.raises(ConfigError) as caught:
        Mesh.fill(world_size, **asked)
    for word in words:
        assert word in str(caught.value)


def test_ranks_and_axes_outside_the_mesh_are_refused() -> None:
    mesh = Mesh(pp=1, dp=2, cp=1, tp=2)
    with pytest.raises(ValueError, match="rank 4 is outside"):
        mesh.coords(4)
    with pytest.raises(ValueError, match="tp=2 is outside"):
        mesh.rank_of(tp=2)
    with pytest.raises(ValueError, match="'ep' is not an axis"):
        mesh.groups("ep")


def test_a_world_beyond_all_machines_is_refused_before_it_fills_the_memory() -> None:
    assert Mesh.fill(MAX_RANKS).dp == MAX_RANKS
    for asked in ({}, {"tp": 7}, {"dp": 3}):
        with pytest.raises(ConfigError, match="a world of 1000000000 ranks is more than the 1048576"):
            Mesh.fill(10**9, **asked)

"""Groups as planned: whole, disjoint, in an order that cannot deadlock, and listed fast enough for 16,384 ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.plan.groups import (
    AXIS_KINDS,
    BACKWARD,
    HDP,
    MODEL,
    TIED,
    TRAINING_KINDS,
    WORLD,
    GroupKind,
    GroupPlan,
    kind_of,
)
from hpc_train.plan.mesh import AXES, Mesh

degrees = st.integers(min_value=1, max_value=4)
meshes = st.builds(Mesh, pp=degrees, dp=degrees, cp=degrees, tp=degrees)
kinds = st.lists(st.sampled_from(AXES), min_size=1, unique=True).map(lambda axes: kind_of(*axes))


@given(meshes, kinds)
def test_groups_hold_every_rank_once_and_differ_in_their_axes_only(mesh: Mesh, kind: GroupKind) -> None:
    plan = GroupPlan(mesh, (kind,))
    groups = plan.groups(kind.name)
    assert groups.shape[1] == plan.group_size(kind.name)
    assert sorted(groups.ravel().tolist()) == list(range(mesh.world_size))
    assert (np.diff(groups, axis=1) > 0).all() and (np.diff(groups[:, 0]) > 0).all()
    for group in groups.tolist():
        others = {tuple(v for axis, v in mesh.coords(rank).items() if axis not in kind.axes) for rank in group}
        assert len(others) == 1
        assert plan.group_of(group[-1], kind.name) == tuple(group)


@given(meshes, st.sampled_from(AXES))
def test_the_groups_of_an_axis_are_those_of_the_mesh(mesh: Mesh, axis: str) -> None:
    assert GroupPlan(mesh).groups(axis).tolist() == [list(group) for group in mesh.groups(axis)]


@given(meshes)
def test_tied_embeddings_are_held_by_the_first_and_last_stage_only(mesh: Mesh) -> None:
    plan = GroupPlan(mesh)
    index = plan.group_index(TIED)
    for rank in range(mesh.world_size):
        pipeline = plan.group_of(rank, "pp")
        ends = tuple(dict.fromkeys((pipeline[0], pipeline[-1])))
        assert plan.group_of(rank, TIED) == (ends if rank in ends else (rank,))
        assert (index[rank] == -1) == (rank not in ends)
    assert plan.groups(TIED).shape == (mesh.dp * mesh.cp * mesh.tp, min(mesh.pp, 2))


@given(meshes, st.lists(kinds, max_size=3, unique_by=lambda kind: kind.name))
def test_no_order_of_arrival_deadlocks(mesh: Mesh, further: list[GroupKind]) -> None:
    """FC-56: played with the one rank that may go on going first or last; every group is met by all of its ranks."""
    plan = GroupPlan(mesh).with_kinds(further)
    for pick in (min, max):
        to_make = {
            rank: [(kind.name, plan.group_of(rank, kind.name)) for kind in plan.made] for rank in range(mesh.world_size)
        }
        queues = {rank: [(n, g) for n, g in groups if len(g) > 1] for rank, groups in to_make.items()}
        waiting: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        ready = {rank for rank, queue in queues.items() if queue}
        while ready:
            rank = pick(ready)
            ready.remove(rank)
            arrived = waiting.setdefault(queues[rank][0], set())
            arrived.add(rank)
            if arrived == set(queues[rank][0][1]):
                for member in arrived:
                    queues[member].pop(0)
                ready |= {member for member in arrived if queues[member]}
        assert not any(queues.values())


@given(meshes)
def test_a_communicator_is_shared_exactly_where_the_ranks_are_the_same(mesh: Mesh) -> None:
    plan = GroupPlan(mesh)
    listing = plan.listing()
    assert [kind for kind in plan.kinds if kind.is_apart] == [plan.kind(BACKWARD)]
    assert plan.same_as(BACKWARD) == BACKWARD
    first_of: dict[str, str] = {str([list(range(mesh.world_size))]): WORLD}
    for kind in plan.kinds:
        if not kind.is_apart:
            assert plan.same_as(kind.name) == first_of.setdefault(str(listing[kind.name]), kind.name)
    assert all(plan.group_size(kind.name) > 1 for kind in plan.made)


def test_groups_of_one_rank_cost_nothing() -> None:
    assert GroupPlan(Mesh(pp=1, dp=1, cp=1, tp=1)).made == ()
    assert [kind.name for kind in GroupPlan(Mesh(pp=1, dp=2, cp=1, tp=2)).made] == ["tp", "dp"]
    assert [kind.name for kind in GroupPlan(Mesh(pp=3, dp=2, cp=2, tp=2)).made] == [
        *("tp", "cp", "dp", "pp", HDP, MODEL, BACKWARD, TIED)
    ]


def test_a_plan_says_what_it_does_not_have() -> None:
    plan = GroupPlan(Mesh(pp=1, dp=2, cp=1, tp=2), AXIS_KINDS)
    with pytest.raises(ValueError, match="'ep' is no axis and no kind of group of this plan; it has tp, cp, dp, pp"):
        plan.groups("ep")
    with pytest.raises(ValueError, match="tp is asked for twice"):
        GroupPlan(plan.mesh, (*AXIS_KINDS, GroupKind("tp", ("tp", "pp"))))
    with pytest.raises(ValueError, match="dp, ep was asked for as axes of a group; give one or more of pp, dp, cp, tp"):
        kind_of("dp", "ep")
    with pytest.raises(ValueError, match="nothing was asked for"):
        kind_of()


def test_every_difference_between_plans_changes_the_hash() -> None:
    mesh = Mesh(pp=2, dp=2, cp=1, tp=2)
    plans = [
        GroupPlan(mesh),
        GroupPlan(mesh, AXIS_KINDS),
        GroupPlan(mesh, tuple(reversed(TRAINING_KINDS))),
        GroupPlan(Mesh(pp=2, dp=1, cp=2, tp=2)),
        GroupPlan(mesh).with_kinds([kind_of("dp", "tp")]),
    ]
    assert len({plan.hash for plan in plans}) == len(plans)
    assert GroupPlan(Mesh(pp=2, dp=2, cp=1, tp=2)).with_kinds([kind_of("tp")]).hash == plans[0].hash


def test_16384_ranks_are_listed() -> None:
    plan = GroupPlan(Mesh(pp=16, dp=32, cp=4, tp=8))
    listing = plan.listing()
    assert [len(listing[name]) for name in ("tp", "cp", "dp", "pp", HDP, MODEL, TIED)] == [
        *(2048, 4096, 512, 1024, 128, 128, 1024)
    ]
    assert listing[HDP][0] == list(range(0, 1024, 8))
    assert listing[TIED][-1] == [1023, 16383]

"""Groups on real gloo ranks: the planned ones, in a number of store operations that neither ranks nor groups change."""

from __future__ import annotations

import dataclasses
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpc_train.comm import groups as comm_groups
from hpc_train.comm import torch_groups
from hpc_train.comm.collectives import Group
from hpc_train.comm.control import TorchControl
from hpc_train.comm.group_store import GroupStore
from hpc_train.comm.groups import build_groups
from hpc_train.errors import CollectiveError, LaunchError
from hpc_train.plan.groups import AXIS_KINDS, MODEL, TIED, GroupPlan, kind_of
from hpc_train.plan.mesh import Mesh
from tests.ranks import TestRank, run_ranks
from tests.worlds import make_world, single_world


class CountingStore(dist.Store):
    """Every operation of one rank, by name."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner = inner
        self.operations: list[str] = []

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: Any) -> None:
        self.operations.append("set")
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.operations.append("get")
        return self.inner.get(key)

    def add(self, key: str, amount: int) -> int:
        self.operations.append("add")
        return self.inner.add(key, amount)

    def append(self, key: str, value: Any) -> None:
        self.operations.append("append")
        self.inner.append(key, value)

    def wait(self, keys: list[str], *limit: Any) -> None:
        self.operations.append("wait")
        self.inner.wait(keys, *limit)

    def check(self, keys: list[str]) -> bool:
        self.operations.append("check")
        return self.inner.check(keys)


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _join(me: TestRank, port: int, timeout_s: float = 60.0) -> Any:
    """The default group over a real TCPStore, as bootstrap makes it."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=me.rank,
        world_size=me.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return make_world(me)


def _formed(me: TestRank, port: int, mesh: Mesh) -> dict[str, Any]:
    """Who is really in each group: every rank sends its number over it."""
    groups = build_groups(_join(me, port), GroupPlan(mesh).with_kinds([kind_of("dp", "tp")]))
    formed = {}
    for kind in groups.plan.kinds:
        group = groups.along(kind.name)
        gathered = [torch.zeros(1, dtype=torch.int64) for _ in group.ranks]
        if group.group_size > 1:
            dist.all_gather(gathered, torch.tensor([me.rank]), group=group.handle)
            assert dist.get_rank(group.handle) == group.group_rank
            assert dist.get_process_group_ranks(group.handle) == list(group.ranks)
        else:
            gathered[0][0] = me.rank
        formed[kind.name] = [int(rank) for rank in gathered]
    assert groups.along("world") is groups.world
    return formed


@pytest.mark.parametrize("mesh", [Mesh(pp=3, dp=1, cp=2, tp=2), Mesh(pp=2, dp=2, cp=2, tp=1)])
def test_the_groups_that_form_are_the_planned_ones(mesh: Mesh, store: Any) -> None:
    formed = run_ranks(_formed, mesh.world_size, store.port, mesh, backend=None)
    plan = GroupPlan(mesh).with_kinds([kind_of("dp", "tp")])
    for rank, groups in enumerate(formed):
        assert groups == {kind.name: list(plan.group_of(rank, kind.name)) for kind in plan.kinds}


def _count(me: TestRank, port: int, mesh: Mesh, plan: GroupPlan) -> tuple[int, list[str]]:
    world = _join(me, port)
    counting = CountingStore(distributed_c10d._get_default_store())
    distributed_c10d._world.pg_map[dist.group.WORLD] = ("gloo", counting)
    before = len(distributed_c10d._world.pg_names)
    groups = build_groups(world, plan)
    total = torch.ones(1)
    for kind in plan.made:
        dist.all_reduce(total, group=groups.along(kind.name).handle)
    return len(distributed_c10d._world.pg_names) - before, counting.operations


@pytest.mark.parametrize("side", [2, 4, 8])
def test_store_operations_of_a_rank_depend_on_its_axes_alone(side: int, store: Any) -> None:
    """4, 16 and 64 ranks, 4 to 16 groups: the last to arrive in each of two groups has one operation more."""
    mesh = Mesh(pp=1, dp=side, cp=1, tp=side)
    counted = run_ranks(_count, mesh.world_size, store.port, mesh, GroupPlan(mesh), backend=None)
    sets = []
    for num_groups, operations in counted:
        assert num_groups == 2
        compared, made = ["get", "add", "get"], ["append", "add", "wait", "get"]
        assert [name for name in operations if name != "set"] == compared + 2 * made
        sets.append(operations.count("set"))
    assert sum(sets) == 2 + 2 * side, "rank 0 and the last one compare; and one for each group of both axes"
    assert max(sets) <= 4


def _count_alone(me: TestRank, port: int) -> tuple[int, list[str]]:
    mesh = Mesh(pp=1, dp=2, cp=1, tp=1)
    return _count(me, port, mesh, GroupPlan(mesh))


def test_groups_of_one_and_of_all_ranks_cost_nothing(store: Any) -> None:
    for num_groups, operations in run_ranks(_count_alone, 2, store.port, backend=None):
        assert num_groups == 0
        assert [name for name in operations if name != "set"] == ["get", "add", "get"], "they compare, and no more"
    assert build_groups(single_world(), GroupPlan(Mesh(pp=1, dp=1, cp=1, tp=1))).by_name == {}


def _differ(me: TestRank, port: int) -> str:
    mesh = Mesh(pp=1, dp=2, cp=1, tp=2) if me.rank != 2 else Mesh(pp=1, dp=1, cp=2, tp=2)
    world = _join(me, port)
    with pytest.raises(
        LaunchError, match="1 of 4 ranks would make other groups than rank 0, the first of them rank 2"
    ) as caught:
        build_groups(world, GroupPlan(mesh))
    with pytest.raises(LaunchError, match="pp 1 x dp 1 x cp 1 x tp 2 = 2 ranks, but there are 4"):
        build_groups(world, GroupPlan(Mesh(pp=1, dp=1, cp=1, tp=2)))
    return str(caught.value.reporter)


def test_a_different_plan_on_one_rank_is_refused_on_all_before_the_first_group(store: Any) -> None:
    """FC-56"""
    assert run_ranks(_differ, 4, store.port, backend=None) == ["0"] * 4


def _again(me: TestRank, port: int) -> list[float]:
    """Groups of some ranks only, groups of torch's own beside ours, then all of it once more, on a second channel."""
    world = _join(me, port)
    sums, made = [], []
    for _ in range(2):
        groups = build_groups(world, GroupPlan(Mesh(pp=3, dp=1, cp=1, tp=2)))
        made.append(groups)
        world = dataclasses.replace(world, control=TorchControl(me.rank, me.world_size, "cpu"))
        own = dist.new_group(sorted([me.rank, (me.rank + 3) % 6]), use_local_synchronization=True)
        total = torch.tensor([float(me.rank)])
        dist.all_reduce(total, group=own)
        for name in ("tp", MODEL, TIED):
            handle = groups.along(name).handle
            if handle is not None:
                dist.all_reduce(total, group=handle)
        sums.append(float(total))
    world.control.barrier()  # gloo aborts the peers of a rank that leaves while they still receive
    for groups in made:
        groups.close()
    return sums


def test_groups_can_be_made_twice_and_beside_torchs_own(store: Any) -> None:
    """FC-56: the middle stage is in one group less, and torch's name for the next group must not differ by it."""
    for first, second in run_ranks(_again, 6, store.port, backend=None):
        assert first == second


def test_ranks_that_do_not_come_are_named(store: Any) -> None:
    """FC-59"""
    ranks = (3, 17, 25)
    with pytest.raises(CollectiveError, match=r"dp group of 3 ranks was not made within 0.5 s: 2 .*: rank 17, 25\."):
        _gloo(store, 3, ranks)


def test_a_late_rank_is_waited_for(store: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        made = [
            pool.submit(_gloo, store, rank, (3, 17, 25), 0.2 * place, 30.0) for place, rank in enumerate((17, 3, 25))
        ]
        assert sorted(group.result().rank() for group in made) == [0, 1, 2]


def _gloo(store: Any, rank: int, ranks: tuple[int, ...], delay_s: float = 0.0, limit_s: float = 0.5) -> Any:
    time.sleep(delay_s)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    meeting = GroupStore(dist.PrefixStore("dp", client), rank, ranks, "dp")
    return dist.ProcessGroupGloo(meeting, ranks.index(rank), len(ranks), timedelta(seconds=limit_s))


def test_one_splits_every_kind_off_the_group_of_all_ranks_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch is asked for: the same on every rank, a rank without peers among them, since a split is collective."""
    mesh = Mesh(pp=3, dp=2, cp=1, tp=2)
    asked: dict[int, list[Any]] = {}
    monkeypatch.setattr(torch_groups, "can_split", lambda: True)
    monkeypatch.setattr(torch_groups, "world_timeout", lambda: timedelta(seconds=7))
    monkeypatch.setattr(comm_groups, "_agree_on_plan", lambda world, plan: "prefix")
    monkeypatch.setattr(
        comm_groups, "world_group", lambda size, rank, *_: Group(tuple(range(size)), rank, None, "nccl")
    )
    for rank in range(mesh.world_size):
        calls = asked[rank] = []
        monkeypatch.setattr(dist, "split_group", lambda calls=calls, **wanted: calls.append(wanted) or "handle")
        world = dataclasses.replace(
            single_world(), rank=rank, world_size=mesh.world_size, backend="nccl", device=torch.device("cuda", 0)
        )
        groups = build_groups(world, GroupPlan(mesh))
        assert groups.along(TIED).handle == ("handle" if rank // 4 != 1 else None)
    assert all(calls == asked[0] for calls in asked.values())
    assert [call["group_desc"] for call in asked[0]] == ["tp", "dp", "pp", MODEL, "pp_backward", TIED]
    assert all(call["timeout"] == timedelta(seconds=7) for call in asked[0])
    for call in asked[0]:
        assert sorted(rank for ranks in call["split_ranks"] for rank in ranks) == list(range(mesh.world_size))
    assert asked[0][-1]["split_ranks"] == [[0, 8], [1, 9], [2, 10], [3, 11], [4], [5], [6], [7]]


def _device_mesh(me: TestRank, port: int) -> None:
    import torch.distributed._functional_collectives as functional
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    world = _join(me, port)
    groups = build_groups(world, GroupPlan(Mesh(pp=1, dp=2, cp=1, tp=2), AXIS_KINDS))
    mesh = groups.device_mesh("dp", "cp", "tp")
    assert mesh.mesh_dim_names == ("dp", "cp", "tp")
    assert tuple(mesh.get_coordinate()) == (me.rank // 2, 0, me.rank % 2)
    assert mesh["tp"].get_group().group_name == groups.along("tp").handle.group_name
    whole = torch.arange(16.0).reshape(4, 4)
    split = distribute_tensor(whole, mesh, [Shard(0), Replicate(), Shard(1)])
    assert torch.equal(split.full_tensor(), whole)
    product = split @ distribute_tensor(torch.eye(4), mesh, [Replicate(), Replicate(), Shard(0)])
    assert isinstance(product, DTensor)
    assert torch.equal(product.full_tensor(), whole)
    total = functional.all_reduce(torch.tensor([float(me.rank)]), "sum", mesh["dp"].get_group())
    assert float(total) == 2 * (me.rank % 2) + 2
    assert groups.device_mesh().mesh_dim_names == ("dp", "tp")
    with pytest.raises(ValueError, match="a device mesh of dp was asked for; name axes of the mesh in the order"):
        groups.device_mesh("dp")
    with pytest.raises(ValueError, match="a device mesh of tp, dp was asked for"):
        groups.device_mesh("tp", "dp")


def test_dtensor_works_on_the_device_mesh_view(store: Any) -> None:
    """FC-57: an axis of degree 1 is legal there too."""
    run_ranks(_device_mesh, 4, store.port, backend=None)

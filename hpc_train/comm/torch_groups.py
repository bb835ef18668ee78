"""Single process groups of torch, made and registered under names of ours. Nothing here knows of meshes.

torch's new_group names a group by how many groups a rank has, which may differ between its members; it also makes a
network device with a thread and a listening port for each gloo group. So groups are made here from torch's own parts.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpc_train.comm.group_store import GroupStore


def can_split() -> bool:
    """Whether nccl may split the group of all ranks: it must be bound to its device, so that it is connected."""
    return dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None


def split_world(split_ranks: list[list[int]], name: str) -> dist.ProcessGroup:
    """nccl: this rank's group of the given ones. Collective over all ranks, each of which is in one of them."""
    handle = dist.split_group(split_ranks=split_ranks, timeout=world_timeout(), group_desc=name)
    assert handle is not None, "every rank is in one of the lists"
    return handle


def single_rank_group(name: str, rank: int, kind: str) -> dist.ProcessGroup:
    """A group of this rank alone, which no other rank and no store hears of; but nccl's split is collective."""
    if can_split():
        return split_world([[other] for other in range(dist.get_world_size())], kind)
    return plain_group((rank,), rank, dist.HashStore(), f"{name}/{secrets.token_hex(4)}", kind)


def plain_group(ranks: Sequence[int], rank: int, store: Any, name: str, kind: str) -> dist.ProcessGroup:
    """A group of the default backend, as torch makes it; members meet as the backend has it.

    Args:
        name: the same for its members, and new to each of them.
        kind: what it is, for people.
    """
    handle, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(rank),
        list(ranks),
        dist.Backend(dist.get_backend()),
        store,
        cast("distributed_c10d.GroupName", name),
        timeout=world_timeout(),
        group_desc=kind,
    )
    distributed_c10d._world.pg_group_ranks[handle] = {member: place for place, member in enumerate(ranks)}
    return handle


class GlooGroups:
    """Makes gloo groups that share their network devices, and whose members meet in a few operations of the store.

    Args:
        store: of all ranks; it must be able to append.
        interfaces: a device for each; none: one, of the host name's address.
    """

    def __init__(self, store: Any, interfaces: Sequence[str] = ()) -> None:
        self._store = store
        make = dist.ProcessGroupGloo
        self._devices = [make.create_device(interface=name) for name in interfaces] or [make.create_default_device()]

    @staticmethod
    def is_possible() -> bool:
        """Not with TORCH_DISTRIBUTED_DEBUG=DETAIL, where torch wraps each group in its own checks."""
        store: Any = distributed_c10d._get_default_store()
        return store.has_extended_api() and dist.get_debug_level() != dist.DebugLevel.DETAIL

    def make(self, ranks: Sequence[int], rank: int, name: str, kind: str) -> dist.ProcessGroup:
        """This rank's group of these ranks. Collective over them; arguments as for plain_group.

        Raises:
            CollectiveError: ranks did not come within the time limit of the group of all ranks.
        """
        group_rank = list(ranks).index(rank)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = self._devices
        options._timeout = world_timeout()
        options.global_ranks_in_group = list(ranks)
        options.group_name = name
        meeting: Any = GroupStore(dist.PrefixStore(f"{name}/meet", self._store), rank, ranks, kind)
        backend = dist.ProcessGroupGloo(meeting, group_rank, len(ranks), options)
        backend._set_sequence_number_for_group()
        store = dist.PrefixStore(f"{name}/", self._store)
        handle = dist.ProcessGroup(store, group_rank, len(ranks))
        handle._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        config = distributed_c10d.BackendConfig(dist.Backend("gloo"))
        for device in config.get_device_backend_map():
            handle._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, backend)
        handle._set_group_name(cast("distributed_c10d.GroupName", name))
        handle._set_group_desc(kind)
        _register(handle, store, name, ranks, str(config))
        return handle


def _register(handle: dist.ProcessGroup, store: dist.Store, name: str, ranks: Sequence[int], config: str) -> None:
    """Tell torch of a group, so that functional collectives, DTensor and destroy_process_group find it."""
    known: Any = distributed_c10d._world
    known.pg_map[handle] = ("gloo", store)
    known.pg_names[handle] = name
    known.pg_backend_config[handle] = config
    known.pg_group_ranks[handle] = {member: place for place, member in enumerate(ranks)}
    tag = f"ptd:{name}"
    known.tags_to_pg.setdefault("", []).append(handle)
    known.tags_to_pg.setdefault(tag, []).append(handle)
    known.pg_to_tag[handle] = tag
    distributed_c10d._register_process_group(cast("distributed_c10d.GroupName", name), handle)


def world_timeout() -> timedelta:
    """The time limit of the group of all ranks, which every other group gets too."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    options: Any = distributed_c10d._get_default_group()._get_backend(device).options
    limit: timedelta = options._timeout
    return limit

"""A process that knows which rank it is meets the others.

1. rank 0 binds a port, before anyone is told of it
2. which device: by the visible-devices rule
3. all hear of address and port, and torch makes its process group, on nccl or gloo
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpc_train import log
from hpc_train.cluster import devices, network
from hpc_train.cluster.binding import read_machine
from hpc_train.cluster.environment import process_env, tell_libraries
from hpc_train.cluster.gloo_interface import gloo_interface, told_interfaces
from hpc_train.comm.control import Control
from hpc_train.comm.world import World
from hpc_train.errors import LaunchError

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI


@dataclass(frozen=True)
class Rendezvous:
    """How ranks meet: the time limit of the group's operations, and under which address rank 0 is reached.

    interface: a network interface in NCCL's notation. address_template: a host name made from the node's, such as
    "{host}i". Both None: what the node's own name resolves to.
    """

    timeout_s: float = 600.0
    interface: str | None = None
    address_template: str | None = None


@dataclass(frozen=True)
class Identity:
    """Ranks and node of a process, in our numbering."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    node: str

    @classmethod
    def single(cls) -> Identity:
        return cls(0, 1, 0, 1, 0, 1, socket.gethostname())


def join(
    identity: Identity,
    control: Control,
    communicator: MPI.Comm | None,
    rendezvous: Rendezvous,
    device: Literal["auto", "cpu"],
    source: str,
) -> World:
    """Choose the device, meet the other ranks, make the process group. Collective."""
    env = process_env()
    listener, own_address, address, error = None, None, None, None
    try:
        # On every rank: gloo is told the interface of each node's own address where it would find none.
        own_address = address = network.advertised_address(
            identity.node,
            rendezvous.interface,
            identity.num_nodes,
            template=rendezvous.address_template,
        )
        if identity.rank == 0 and identity.world_size > 1:
            address, port = network.preset_address(env) or (address, None)
            listener = _listen(address, port or 0)
    except LaunchError as problem:
        error = problem
    control.agree(error, identity.node)
    import torch.distributed as dist

    chosen, error = None, None
    try:
        chosen = choose_device(env, identity.local_rank, identity.local_world_size, device)
        if backend_of(chosen) == "gloo" and identity.num_nodes > 1:
            assert own_address is not None
            tell_gloo(env, own_address, identity.rank, is_chosen=rendezvous.interface is not None)
    except LaunchError as problem:
        error = problem
    control.agree(error, identity.node)
    assert chosen is not None
    set_device(chosen)
    backend = backend_of(chosen)
    if identity.world_size == 1:
        _init_group(backend, dist.HashStore(), identity, rendezvous, chosen)
    else:
        place = [address, listener.getsockname()[1]] if listener else None
        host, port = control.broadcast(place)
        store = _store(host, port, identity, rendezvous, listener)
        _init_group(backend, store, identity, rendezvous, chosen)
        _prove_connected(chosen, identity)
    return World(
        **{name: getattr(identity, name) for name in identity.__dataclass_fields__},
        device=chosen,
        backend=backend,
        control=control,
        mpi=communicator,
        source=source,
    )


def tell_gloo(env: Mapping[str, str], address: str, rank: int, *, is_chosen: bool = False) -> None:
    """Tell gloo on this node of several the interface of its address, unless the user has, or gloo finds a good one.

    Raises:
        LaunchError: as gloo_interface.
    """
    if told_interfaces(env):
        return
    found = gloo_interface(socket.gethostname(), address, is_chosen=is_chosen)
    if found is None:
        return
    tell_libraries(found.variables)
    if rank == 0:
        log.say(f"gloo takes {found.name}, {address}, here on rank 0's node: {found.reason}")


def _init_group(backend: str, store: Any, identity: Identity, rendezvous: Rendezvous, device: torch.device) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        store=store,
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=timeout_of(rendezvous),
        device_id=bound_to(device),
    )


def bound_to(device: torch.device) -> torch.device | None:
    """nccl connects all ranks at once to a device that it is told, and can then split groups off; gloo has none."""
    return device if device.type == "cuda" else None


def _prove_connected(device: torch.device, identity: Identity) -> None:
    """One real sum over all ranks: what is wrong with the network shows now, and not hours into a queue of steps."""
    import torch
    import torch.distributed as dist

    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if int(total) != identity.world_size:
        raise LaunchError(
            f"a first sum over {identity.world_size} ranks gave {float(total):g}. The network or its library "
            "corrupts data; run the job on other nodes (submit -x NODE) to find which."
        )


def _listen(address: str, port: int) -> socket.socket:
    """Bind the port (0: a free one) before anyone is told of it. The queue is long: all ranks call at once."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, port))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"rank 0 cannot listen on {address}, port {port}: {error}. Name the interface that the nodes share with "
            "launch.interface=NAME."
        ) from error
    return listener


def _store(host: str, port: int, identity: Identity, rendezvous: Rendezvous, listener: socket.socket | None) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(
        host_name=host,
        port=port,
        world_size=identity.world_size,
        is_master=listener is not None,
        timeout=timeout_of(rendezvous),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )


def choose_device(
    env: Mapping[str, str], local_rank: int, local_world_size: int | None, device: Literal["auto", "cpu"]
) -> torch.device:
    import torch

    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        devices.refuse_amd_only(len(read_machine().gpus))
        return torch.device("cpu")
    choice = devices.choose_device(env, local_rank, local_world_size, torch.cuda.device_count())
    if choice.warning and local_rank == 0:
        log.warn(choice.warning)
    return torch.device("cpu") if choice.index is None else torch.device("cuda", choice.index)


def set_device(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(device)


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def timeout_of(rendezvous: Rendezvous) -> Any:
    from datetime import timedelta

    return timedelta(seconds=rendezvous.timeout_s)

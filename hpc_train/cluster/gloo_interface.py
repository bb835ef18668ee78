"""Which interface gloo takes on this node: that of the host name, and loopback without a word where that gives none.

So where ranks are on several nodes it is told the interface by which the others reach this node.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpc_train.cluster.network import Interface, describe_interfaces, is_loopback, list_interfaces
from hpc_train.errors import LaunchError

GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_ANY_PORT = 9  # of a datagram socket that sends nothing


@dataclass(frozen=True)
class GlooInterface:
    """The interface that gloo is to be told, and why."""

    name: str
    reason: str

    @property
    def variables(self) -> dict[str, str]:
        return {GLOO_INTERFACE_VARIABLE: self.name}


def told_interfaces(env: Mapping[str, str]) -> tuple[str, ...]:
    """The interfaces that gloo has been told; none: it goes by the host name."""
    return tuple(name for name in env.get(GLOO_INTERFACE_VARIABLE, "").split(",") if name)


def address_towards(host: str) -> str:
    """The IPv4 address of this node from which it reaches a host. Nothing is sent.

    Raises:
        OSError: the host's name does not resolve, or there is no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))
        return str(probe.getsockname()[0])


def gloo_interface(
    host: str,
    address: str,
    *,
    is_chosen: bool = False,
    resolve: Callable[[str], str] = socket.gethostbyname,
    is_own: Callable[[str], bool] | None = None,
    interfaces: Mapping[str, Interface] | None = None,
) -> GlooInterface | None:
    """What gloo must be told on this node where there are others; None where its own choice is one they can reach.

    Args:
        host: This host's name, by which gloo chooses.
        address: Where the other nodes reach this one.
        is_chosen: The user has named the interface of that address.
        is_own: Whether an address is this node's.

    Raises:
        LaunchError: The host name gives no address that others reach, and no interface has the one that does.
    """
    told = None
    if not is_chosen:
        told = _unusable(host, resolve, is_own or _can_bind)
        if told is None:
            return None
    table = list_interfaces() if interfaces is None else interfaces
    found = [item for item in table.values() if item.address == address and item.is_up and not item.is_loopback]
    if found:
        return GlooInterface(found[0].name, told or "launch.interface names it")
    raise LaunchError(
        f"{told or 'launch.interface names it'}, so gloo would listen where other nodes do not reach it; and no "
        f"interface of this node has {address}, the address by which it is known ({describe_interfaces(table)}). Name "
        f"the interface that the nodes share with launch.interface=NAME, or export {GLOO_INTERFACE_VARIABLE}=NAME."
    )


def _unusable(host: str, resolve: Callable[[str], str], is_own: Callable[[str], bool]) -> str | None:
    """Why gloo cannot go by the host name, or None if it can."""
    try:
        address = resolve(host)
    except OSError as error:
        return f"the host name {host} does not resolve on its own node ({error.strerror or error})"
    if is_loopback(address):
        return f"the host name {host} resolves to {address} on its own node"
    return None if is_own(address) else f"the host name {host} resolves to {address}, which is not this node's"


def _can_bind(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True

"""Interfaces of this node and the address that rank 0 tells the others. Nothing is guessed per rank."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from hpc_train.cluster.environment import STORE_IS_HELD_VARIABLE
from hpc_train.errors import LaunchError

# cited: netdevice(7), linux/sockios.h and linux/if.h.
_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_IFF_UP = 0x1


@dataclass(frozen=True)
class Interface:
    """A network interface and its first IPv4 address; address and netmask are None where it has none."""

    name: str
    address: str | None
    netmask: str | None
    is_up: bool

    @property
    def network(self) -> IPv4Network | None:
        if self.address is None or self.netmask is None:
            return None
        return IPv4Network(f"{self.address}/{self.netmask}", strict=False)

    @property
    def is_loopback(self) -> bool:
        return self.address is not None and is_loopback(self.address)


@dataclass(frozen=True)
class CommonNetwork:
    """A subnet on which every node has an interface; names are per node, since they may differ."""

    network: IPv4Network
    names: tuple[str, ...]


def list_interfaces() -> dict[str, Interface]:
    """Return the interfaces of this node by name, with or without an address."""
    interfaces = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            flags = _ioctl(probe, _SIOCGIFFLAGS, name)
            is_up = flags is not None and bool(struct.unpack_from("H", flags, 16)[0] & _IFF_UP)
            address, netmask = (
                None if answer is None else socket.inet_ntoa(answer[20:24])
                for answer in (_ioctl(probe, _SIOCGIFADDR, name), _ioctl(probe, _SIOCGIFNETMASK, name))
            )
            interfaces[name] = Interface(name, address, netmask, is_up)
    return interfaces


def match_interfaces(pattern: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that NCCL would take for NCCL_SOCKET_IFNAME=pattern, in the order of names.

    `eth,ib` matches prefixes (also bond0.2 for bond0), `=eth0` whole names, `^docker` all but those (loopback
    is then among them), `^=eth0` all but whole names. An empty pattern matches all.
    """
    exclude = pattern.startswith("^")
    text = pattern[1:] if exclude else pattern
    exact = text.startswith("=")
    wanted = [item for item in text.removeprefix("=").split(",") if item]
    if not wanted:
        return tuple(names)
    return tuple(
        name for name in names if any(name == item if exact else name.startswith(item) for item in wanted) != exclude
    )


def advertised_address(
    host: str,
    interface: str | None = None,
    num_nodes: int = 1,
    *,
    template: str | None = None,
    resolve: Callable[[str], str] = socket.gethostbyname,
    interfaces: Mapping[str, Interface] | None = None,
) -> str:
    """Return the IPv4 address under which this node can be reached by the other nodes.

    Args:
        host: This node's name.
        interface: The user's choice, in NCCL's form; the first match with an address is taken.
        num_nodes: Nodes that take part. Loopback is accepted only for one.
        template: A name made from the host's, such as `{host}i` for its name on the fabric.

    Raises:
        LaunchError: No such interface, no address, a name that does not resolve, or loopback for several.
    """
    if interface is not None:
        return _address_of(interface, num_nodes, list_interfaces() if interfaces is None else interfaces)
    name = host
    if template is not None:
        if "{host}" not in template:
            raise LaunchError(
                f"launch.address_template={template!r} does not hold {{host}}, so all nodes would get one "
                "name. Use for example '{host}i' or '{host}-ib0'."
            )
        name = template.replace("{host}", host)
    try:
        address = resolve(name)
    except OSError as error:
        raise LaunchError(
            f"The host name {name} does not resolve on its own node ({error}). Name the interface "
            "with launch.interface=NAME, or another host name with launch.address_template='{host}...'."
        ) from error
    if num_nodes > 1 and is_loopback(address):
        raise LaunchError(
            f"The host name {name} resolves to {address} on its own node, which the other {num_nodes - 1} nodes "
            f"cannot reach. Most often a line `{address} {name}` in /etc/hosts is the cause: remove the name from "
            "it, or name the interface with launch.interface=NAME."
        )
    return address


def preset_address(env: Mapping[str, str]) -> tuple[str, int | None] | None:
    """Return MASTER_ADDR and MASTER_PORT where the user has set them: they are respected, not replaced.

    No port where a launcher has set them and holds a store there itself.

    Raises:
        LaunchError: MASTER_PORT is no port.
    """
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        raise LaunchError(f"MASTER_PORT={port!r} is no port from 1 to 65535. Unset it, or set a free port.")
    is_taken = env.get(STORE_IS_HELD_VARIABLE) == "True"
    return (address, int(port) if port and not is_taken else None) if address else None


def common_interfaces(
    tables: Sequence[Mapping[str, Interface]], rank0: int = 0, hosts: Sequence[str] | None = None
) -> tuple[CommonNetwork, ...]:
    """Return the subnets of rank 0's node on which every node has a running interface.

    Args:
        tables: One table of interfaces a node.
        rank0: The index of rank 0's node.
        hosts: Names of the nodes, for the error.

    Raises:
        LaunchError: There is none.
    """
    found = []
    for candidate in tables[rank0].values():
        network = candidate.network
        if network is None or candidate.is_loopback or not candidate.is_up:
            continue
        names = [_on_network(table, network) for table in tables]
        names[rank0] = candidate.name
        complete = tuple(name for name in names if name is not None)
        if len(complete) == len(tables):
            found.append(CommonNetwork(network, complete))
    if not found:
        labels = hosts if hosts is not None else [f"node {index}" for index in range(len(tables))]
        seen = "; ".join(f"{label}: {describe_interfaces(table)}" for label, table in zip(labels, tables, strict=True))
        raise LaunchError(
            f"No network of rank 0's node is there on all {len(tables)} nodes ({seen}). Name the interface with "
            "launch.interface=NAME if the networks are routed to each other."
        )
    return tuple(found)


def _address_of(pattern: str, num_nodes: int, interfaces: Mapping[str, Interface]) -> str:
    matched = [interfaces[name] for name in match_interfaces(pattern, list(interfaces))]
    if not matched:
        raise LaunchError(
            f"launch.interface={pattern} matches no interface of this node, which has "
            f"{describe_interfaces(interfaces)}. Names are matched by prefix; `=NAME` is exact and `^NAME` excludes."
        )
    usable = [
        item.address
        for item in matched
        if item.address is not None and item.is_up and not (num_nodes > 1 and item.is_loopback)
    ]
    if not usable:
        raise LaunchError(
            f"launch.interface={pattern} matches {', '.join(item.name for item in matched)}, but none of these has "
            f"an IPv4 address that {num_nodes} nodes can use (down, without address, or loopback). This node has "
            f"{describe_interfaces(interfaces)}."
        )
    return usable[0]


def _on_network(table: Mapping[str, Interface], network: IPv4Network) -> str | None:
    return next((item.name for item in table.values() if item.is_up and item.network == network), None)


def describe_interfaces(interfaces: Mapping[str, Interface]) -> str:
    """`lo 127.0.0.1, eth0 10.0.0.5, ib0 without address (down)`."""
    return ", ".join(
        f"{item.name} {item.address or 'without address'}{'' if item.is_up else ' (down)'}"
        for item in interfaces.values()
    )


def is_loopback(address: str) -> bool:
    """Whether an address means this node on every node."""
    try:
        return IPv4Address(address).is_loopback
    except ValueError:
        return False


def _ioctl(probe: socket.socket, request: int, name: str) -> bytes | None:
    import fcntl

    try:
        return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None

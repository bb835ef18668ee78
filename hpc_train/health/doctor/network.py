"""The network by which ranks meet, and the interfaces and cards that NCCL and gloo would take."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hpc_train.cluster.network import Interface, advertised_address, common_interfaces, match_interfaces
from hpc_train.errors import LaunchError
from hpc_train.health.doctor.findings import Finding

_IFNAME_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "launch.interface")
# cited: NCCL's environment variables page: without NCCL_SOCKET_IFNAME, ib* first, then others; docker* and lo last.
_NCCL_LAST = ("docker", "lo")


def resolve(host: str) -> str:
    """The IPv4 address of a host's name as it resolves here, or why it has none."""
    try:
        return socket.gethostbyname(host)
    except OSError as problem:
        return f"does not resolve: {problem.strerror or problem}"


def own_findings(
    interfaces: Mapping[str, Interface], rdma: Sequence[str], env: Mapping[str, str], host: str, *, num_nodes: int
) -> list[Finding]:
    """What is wrong with one node's settings, seen from that node alone."""
    found = []
    for variable in _IFNAME_VARIABLES:
        pattern = env.get(variable)
        if pattern:
            found.append(_pattern_finding(variable, pattern, interfaces, host, num_nodes))
    if rdma and (text := env.get("NCCL_IB_HCA")):
        found += hca_findings(text, rdma, host)
    return found


def hca_findings(text: str, rdma: Sequence[str], host: str) -> list[Finding]:
    """What NCCL_IB_HCA takes among a node's cards: names are prefixes unless `=` stands before them."""
    matched = match_hca(text, rdma)
    if not matched:
        told = f"NCCL_IB_HCA={text} matches none of {', '.join(rdma)}: NCCL would use TCP sockets"
        return [Finding("network.hca", "error", told, "correct it, or unset it to let NCCL take all cards", (host,))]
    exact = text.lstrip("^").startswith("=")
    items = [item.partition(":")[0] for item in text.lstrip("^=").split(",") if item]
    trapped = {
        item: longer
        for item in items
        if not exact and item in rdma and (longer := [name for name in rdma if name.startswith(item) and name != item])
    }
    if trapped:
        words = "; ".join(f"{item} also matches {', '.join(longer)}" for item, longer in trapped.items())
        told = f"NCCL_IB_HCA={text} is a list of prefixes: {words}"
        prefix = "^=" if text.startswith("^") else "="
        cure = f"export NCCL_IB_HCA={prefix}{text.lstrip('^=')}"
        return [Finding("network.hca", "warning", told, cure, (host,))]
    return [Finding("network.hca", "ok", f"NCCL_IB_HCA={text} takes {', '.join(matched)}", hosts=(host,))]


def match_hca(text: str, rdma: Sequence[str]) -> tuple[str, ...]:
    """The cards that NCCL takes for NCCL_IB_HCA=text, whatever ports (`mlx5_0:1`) it names."""
    head = text[: len(text) - len(text.lstrip("^="))]
    items = ",".join(item.partition(":")[0] for item in text.lstrip("^=").split(","))
    return match_interfaces(head + items, rdma)


def common_findings(
    tables: Mapping[str, Mapping[str, Interface]],
    addresses: Mapping[str, str],
    env: Mapping[str, str],
    *,
    template: str | None = None,
) -> list[Finding]:
    """The network of all nodes together.

    Args:
        tables: Interfaces by node, rank 0's node first.
        addresses: What resolve says on each node of the name by which it is known.
    """
    hosts = list(tables)
    found = _address_findings(tables, addresses, env, template)
    if len(hosts) < 2:
        return found
    try:
        networks = common_interfaces(list(tables.values()), hosts=hosts)
    except LaunchError as error:
        cure = "name the interface by launch.interface, or ask the site which network joins these nodes"
        return [*found, Finding("network.common", "error", str(error), cure)]
    for network in networks:
        names = sorted(set(network.names))
        told = f"network {network.network} is there on all {len(hosts)} nodes"
        if len(names) == 1:
            found.append(Finding("network.common", "ok", f"{told}, as {names[0]}"))
        else:
            odd = ", ".join(f"{name} on {sum(other == name for other in network.names)}" for name in names)
            cure = f"export NCCL_SOCKET_IFNAME=={','.join(names)} (exact names), and leave GLOO_SOCKET_IFNAME unset"
            found.append(Finding("network.names", "warning", f"{told}, but under different names: {odd}", cure))
    if not env.get("NCCL_SOCKET_IFNAME"):
        found.append(_nccl_choice(tables))
    return found


def as_json(interfaces: Mapping[str, Interface]) -> dict[str, Any]:
    return {name: [item.address, item.netmask, item.is_up] for name, item in interfaces.items()}


def from_json(table: Mapping[str, Any]) -> dict[str, Interface]:
    return {name: Interface(name, *values) for name, values in table.items()}


def _address_findings(
    tables: Mapping[str, Mapping[str, Interface]],
    addresses: Mapping[str, str],
    env: Mapping[str, str],
    template: str | None,
) -> list[Finding]:
    """How rank 0 is reached, and nodes whose address a run would refuse: all of them look for their own (FC-12)."""
    first = next(iter(tables))
    found = []
    for host, table in tables.items():
        finding = "network.rank0" if host == first else "network.address"
        try:
            address = advertised_address(
                host,
                env.get("launch.interface"),
                len(tables),
                template=template,
                resolve=partial(_looked_up, addresses[host]),
                interfaces=table,
            )
        except LaunchError as error:
            cure = f"set launch.interface, for example to {_usable(table)}"
            found.append(Finding(finding, "error", str(error), cure, (host,)))
        else:
            if host == first:
                found.append(Finding(finding, "ok", f"rank 0 on {host} would be reached at {address}"))
    return found


def _looked_up(answer: str, name: str) -> str:
    if answer.startswith("does not resolve"):
        raise OSError(answer)
    return answer


def _usable(table: Mapping[str, Interface]) -> str:
    names = [item.name for item in table.values() if item.is_up and item.address and not item.is_loopback]
    return names[0] if names else "NAME"


def _pattern_finding(
    variable: str, pattern: str, interfaces: Mapping[str, Interface], host: str, num_nodes: int
) -> Finding:
    matched = match_interfaces(pattern, list(interfaces))
    usable = [
        name
        for name in matched
        if interfaces[name].is_up and interfaces[name].address and not (num_nodes > 1 and interfaces[name].is_loopback)
    ]
    there = ", ".join(f"{item.name} {item.address or 'without address'}" for item in interfaces.values())
    if not usable:
        told = (
            f"{variable}={pattern} matches {', '.join(matched) or 'nothing'} here, which {num_nodes} nodes cannot use"
        )
        return Finding(
            "network.interface", "error", f"{told}; there are {there}", f"correct or unset {variable}", (host,)
        )
    loops = [name for name in matched if interfaces[name].is_loopback]
    if pattern.startswith("^") and loops and num_nodes > 1:
        told = f"{variable}={pattern} excludes what it names and so takes {', '.join(loops)} in again"
        cure = f"export {variable}={pattern},{','.join(loops)}"
        return Finding("network.interface", "warning", told, cure, (host,))
    unusable = [name for name in matched if name not in usable]
    if unusable:
        told = f"{variable}={pattern} also matches {', '.join(unusable)}, which cannot be used"
        return Finding("network.interface", "warning", told, f"export {variable}=={usable[0]} (exact)", (host,))
    return Finding("network.interface", "ok", f"{variable}={pattern} takes {', '.join(usable)}", hosts=(host,))


def _nccl_choice(tables: Mapping[str, Mapping[str, Interface]]) -> Finding:
    """What NCCL takes for its sockets by its own rules, where nothing is preset."""
    taken: dict[str, list[str]] = {}
    for host, table in tables.items():
        usable = [item for item in table.values() if item.is_up and item.address]
        order = sorted(usable, key=lambda item: (item.name.startswith(_NCCL_LAST), not item.name.startswith("ib")))
        first = order[0].name if order else "nothing"
        networks = [str(item.network) for item in order[:1]]
        taken.setdefault(f"{first} ({', '.join(networks)})" if networks else first, []).append(host)
    told = "; ".join(f"{name} on {len(hosts)} nodes" for name, hosts in taken.items())
    if len(taken) == 1:
        return Finding("network.nccl", "ok", f"NCCL's sockets would take {told} (NCCL_SOCKET_IFNAME is not set)")
    cure = "export NCCL_SOCKET_IFNAME with the interface of the network that joins them"
    return Finding("network.nccl", "warning", f"NCCL's sockets would take different networks: {told}", cure)

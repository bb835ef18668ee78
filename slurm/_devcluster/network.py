"""The cluster's network: a namespace a host, one bridge in a namespace of its own, a link to this machine."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
from collections.abc import Iterable

from .layout import Layout, link_name, namespace_prefix
from .machine import ClusterError, namespaces, run

_BURST = "128kb"
"""What goes at once after a pause. Not below a link's largest packet of 64 KiB with its headers: tbf cuts those into
frames then, whose handling took 41 % of two cores at 150mbit, against 8 % so (measured).
"""


def build(layout: Layout) -> None:
    """Make the namespaces, the bridge and all links; every interface is up at the end."""
    switch = layout.switch_namespace
    bits = layout.network.prefixlen
    lines = [f"netns add {switch}", *(f"netns add {layout.namespace(host)}" for host in layout.hosts)]
    lines += [
        f"link add {host} netns {switch} type veth peer name eth0 netns {layout.namespace(host)}"
        for host in layout.hosts
    ]
    lines.append(f"link add {layout.link} type veth peer name machine netns {switch}")
    lines.append(f"address add {layout.machine_address}/{bits} dev {layout.link}")
    lines.append(f"link set {layout.link} up")
    _ip(lines)
    ports = [*layout.hosts, "machine"]
    _ip(
        ["link add br0 type bridge", "link set br0 up", "link set lo up"]
        + [f"link set {port} master br0 up" for port in ports],
        switch,
    )
    for host in layout.hosts:
        address = f"address add {layout.address(host)}/{bits} dev eth0"
        _ip(["link set lo up", address, "link set eth0 up"], layout.namespace(host))


def remove(name: str) -> None:
    """Remove what build made, or what is left of it."""
    if link_name(name) in os.listdir("/sys/class/net"):
        # It goes by itself, a moment later, where its peer's namespace was removed by hand.
        subprocess.run(["ip", "link", "delete", link_name(name)], capture_output=True)
    for namespace in namespaces(namespace_prefix(name)):
        run(["ip", "netns", "delete", namespace])


def _ip(lines: Iterable[str], namespace: str | None = None) -> None:
    run(["ip", *(["-n", namespace] if namespace else []), "-batch", "-"], text="\n".join(lines) + "\n")


def free_subnet() -> str:
    """The first of 10.77.0.0/24, 10.77.1.0/24, ... that this machine does not use."""
    for third in range(256):
        candidate = f"10.77.{third}.0/24"
        if _in_the_way(ipaddress.IPv4Network(candidate)) is None:
            return candidate
    raise ClusterError("all of 10.77.0.0/16 is in use on this machine: give a free one with --subnet")


def require_free(subnet: ipaddress.IPv4Network) -> None:
    """Raises ClusterError where this machine already reaches some of these addresses in another way."""
    if (other := _in_the_way(subnet)) is not None:
        raise ClusterError(
            f"--subnet {subnet} overlaps {other}, which this machine has: choose another, "
            "or leave --subnet out and a free one is taken"
        )


def _in_the_way(subnet: ipaddress.IPv4Network) -> str | None:
    """A route of this machine that a link into subnet would break, or be broken by.

    A wider one (the default route, a VPN's 10.0.0.0/8) does not count: the narrower route wins.
    """
    for route in json.loads(run(["ip", "-j", "-4", "route", "show", "table", "all"]) or "[]"):
        if route.get("dst", "default") != "default":
            network = ipaddress.IPv4Network(route["dst"])
            if network.overlaps(subnet) and network.prefixlen >= subnet.prefixlen:
                return f"{network} on {route.get('dev', 'some link')}"
    return None


def links(layout: Layout) -> dict[str, str]:
    """For each host, its link as the switch sees it: up, down, or up and shaped."""
    shown = json.loads(run(["ip", "-n", layout.switch_namespace, "-j", "link", "show"]))
    found = {}
    for link in shown:
        state = "up" if "UP" in link["flags"] else "down"
        found[link["ifname"]] = state + (", shaped" if link.get("qdisc") == "tbf" else "")
    return {host: found.get(host, "gone") for host in layout.hosts}


def set_link(layout: Layout, host: str, state: str) -> None:
    """Pull a host's cable, or put it back: the switch's end, which nothing on the host can change."""
    run(["ip", "-n", layout.switch_namespace, "link", "set", host, state])


def shape(layout: Layout, host: str, rate: str | None, latency: str) -> None:
    """Limit what a host sends and what it receives to rate each (tc's words: 200mbit); None: no limit.

    latency is the longest that a packet waits in the queue before it is dropped.
    """
    for namespace, device in ((layout.namespace(host), "eth0"), (layout.switch_namespace, host)):
        command = ["tc", "-n", namespace, "qdisc"]
        if rate is not None:
            limits = ["tbf", "rate", rate, "burst", _BURST, "latency", latency]
            run([*command, "replace", "dev", device, "root", *limits])
        elif "tbf" in run([*command, "show", "dev", device]):
            run([*command, "delete", "dev", device, "root"])

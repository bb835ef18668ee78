"""Ports that have to be named before somebody listens there."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def unused_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at, outside of those that the kernel gives to connections meanwhile."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [port for port in range(10_000, 1 << 16) if not first <= port <= last] or list(range(10_000, 1 << 16))
    found: list[int] = []
    for port in random.sample(ports, len(ports)):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"{count} ports were asked for, and {len(found)} are free")

"""A network namespace of its own behind a link of a given rate, so that a service in it is as slow as one far away."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_NETWORK = "10.79.0"


@dataclass(frozen=True)
class ShapedLink:
    """address: of the namespace. enter: words before a command that run it there."""

    address: str
    enter: tuple[str, ...]


@contextmanager
def shaped_link(rate: str | None) -> Iterator[ShapedLink]:
    """rate: of what comes out of the namespace, in tc's words (1gbit); None: not limited. Needs root and iproute2."""
    name = f"hpc-train-{os.getpid()}"
    ours, theirs = f"ht{os.getpid()}", "eth0"
    try:
        _ip("netns", "add", name)
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        _ip("address", "add", f"{_NETWORK}.1/30", "dev", ours)
        _ip("link", "set", ours, "up")
        _ip("-n", name, "address", "add", f"{_NETWORK}.2/30", "dev", theirs)
        _ip("-n", name, "link", "set", theirs, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        if rate is not None:
            # A burst of what the rate gives in a few milliseconds, else the kernel's timer makes it slower.
            limit = ["tbf", "rate", rate, "burst", "1mb", "latency", "50ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", theirs, "root", *limit)
        yield ShapedLink(f"{_NETWORK}.2", ("nsenter", f"--net=/run/netns/{name}"))
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}")

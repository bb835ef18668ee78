"""A simulated InfiniBand fabric (ibsim), which the real ibnetdiscover looks at."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("ibsim", "ibnetdiscover")


def missing_programs() -> list[str]:
    found = [name for name in PROGRAMS if shutil.which(name, path=_search_path()) is None]
    return found + ([] if _preload() is not None else ["libumad2sim.so"])


@dataclass
class Network:
    """Switches and cards, and which port of which is joined to which. The first that is added is asked."""

    ports: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    links: dict[str, list[tuple[int, str, int]]] = field(default_factory=dict)

    def add(self, kind: str, name: str, ports: int) -> None:
        self.kinds[name], self.ports[name], self.links[name] = kind, ports, []

    def join(self, first: str, second: str) -> None:
        """One more link, from the next free port of one to that of the other."""
        here, there = (max([0, *(link[0] for link in self.links[name])]) + 1 for name in (first, second))
        assert here <= self.ports[first], first
        assert there <= self.ports[second], second
        self.links[first].append((here, second, there))
        self.links[second].append((there, first, here))

    def cut(self, first: str, second: str) -> None:
        """Take all links between two away; other ports keep their numbers."""
        self.links[first] = [link for link in self.links[first] if link[1] != second]
        self.links[second] = [link for link in self.links[second] if link[1] != first]

    def text(self) -> str:
        """The file that ibsim reads."""
        parts = []
        for name, kind in self.kinds.items():
            lines = [f'[{port}]\t"{other}"[{their}]' for port, other, their in self.links[name]]
            parts.append("\n".join([f'{kind}\t{self.ports[name]} "{name}"', *lines]))
        return "\n\n".join(parts) + "\n"


def three_tiers(
    *, pods: int, leaves: int, nodes: int, rails: int, spines: int = 2, cores: int = 2, planes: bool = False
) -> Network:
    """nodes below each run of `rails` leaves, as many runs as `leaves` in a pod; each leaf joined to each spine.

    planes: the spines of one number have cores of their own, as many as `cores`; else all are joined to all.
    """
    net = Network()
    for core in range(cores * spines if planes else cores):
        net.add("Switch", f"core{core}", 64)
    for pod in range(pods):
        for spine in range(spines):
            net.add("Switch", f"pod{pod} spine{spine}", 64)
            for core in range(spine * cores, (spine + 1) * cores) if planes else range(cores):
                net.join(f"pod{pod} spine{spine}", f"core{core}")
        for group in range(leaves):
            for rail in range(rails):
                leaf = f"pod{pod} leaf{group} rail{rail}"
                net.add("Switch", leaf, 64)
                for spine in range(spines):
                    net.join(leaf, f"pod{pod} spine{spine}")
                for node in range(nodes):
                    card = f"{node_name(pod, group, node)} mlx5_{rail}"
                    net.add("Hca", card, 1)
                    net.join(card, leaf)
    return net


def node_name(pod: int, group: int, node: int) -> str:
    """Names that do not follow the switches."""
    return f"n{node}{group}{pod}" if max(node, group, pod) < 10 else f"n{node:02d}{group:02d}{pod:02d}"


def discover(env: Mapping[str, str]) -> str:
    """What the real ibnetdiscover prints of a simulated network."""
    # Its preloaded library makes a folder sys-PID where it is started.
    return subprocess.run(
        ["ibnetdiscover"], cwd=env["IBSIM_SOCKNAME"], env=env, capture_output=True, text=True, check=True
    ).stdout


@contextmanager
def simulated(net: Network) -> Iterator[Mapping[str, str]]:
    """Yield the environment in which the InfiniBand tools see this network."""
    with tempfile.TemporaryDirectory(prefix="hpc_train-ib-") as folder:
        (Path(folder) / "net").write_text(net.text())
        # ibsim reads commands, and ends with its standard input; IBSIM_SOCKNAME names its sockets.
        env = {**os.environ, "PATH": _search_path(), "SIM_HOST": next(iter(net.kinds)), "IBSIM_SOCKNAME": folder}
        limit = str(2 * len(net.kinds) + 16)
        with open(Path(folder) / "log", "w") as log:
            process = subprocess.Popen(
                ["ibsim", "-N", limit, "-S", limit, "-P", str(4 * sum(net.ports.values())), "-s", "net"],
                cwd=folder,
                env=env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        try:
            # Its sockets are abstract ones, which the kernel lists.
            deadline = time.monotonic() + 20 + len(net.kinds) / 100
            while folder not in Path("/proc/net/unix").read_text():
                assert process.poll() is None and time.monotonic() < deadline, (Path(folder) / "log").read_text()[-500:]
                time.sleep(0.02)
            yield {**env, "LD_PRELOAD": str(_preload())}
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def _preload() -> Path | None:
    found = sorted(Path("/usr/lib").glob("*/umad2sim/libumad2sim.so"))
    return found[0] if found else None


def _search_path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

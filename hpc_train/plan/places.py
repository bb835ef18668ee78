"""Where the GPUs of some nodes hang in the fabric, as arrays of whole numbers that planners compute with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpc_train.cluster.fabric import Fabric, FabricNode
from hpc_train.errors import ConfigError

NOWHERE = -1


@dataclass(frozen=True)
class Places:
    """The network as the GPUs of some nodes see it.

    domain: by node; nodes of the same number reach each other without a switch. rail, leaf, pod: by node and GPU; a
    GPU whose own rail has no link has the nearest rail of its node that has one, and NOWHERE where none has. leaves,
    pods: the names behind the numbers. notes: what a person should know about it.
    """

    nodes: tuple[str, ...]
    domain: np.ndarray
    rail: np.ndarray
    leaf: np.ndarray
    pod: np.ndarray
    leaves: tuple[str, ...]
    pods: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def port(self) -> np.ndarray:
        """A number for each pair of leaf and rail: GPUs of one number meet in one switch."""
        rails = int(self.rail.max(initial=0)) + 1
        return np.where(self.leaf == NOWHERE, NOWHERE, self.leaf.astype(np.int64) * rails + self.rail)


def find_places(fabric: Fabric, nodes: Sequence[str], num_gpus: Sequence[int]) -> Places:
    """Look up the GPUs 0 to num_gpus - 1 of each node.

    Raises:
        ConfigError: the fabric has not the node, or no rail for one of its GPUs.
    """
    unknown = [node for node in nodes if node not in fabric.nodes]
    if unknown:
        raise ConfigError(
            f"the fabric from {fabric.source} has no node {', '.join(unknown[:8])}{', ...' if len(unknown) > 8 else ''}"
            f" ({len(unknown)} of {len(nodes)} allocated nodes are missing). Read the fabric again, or leave "
            "fabric.source out to take what Slurm tells"
        )
    width = max(num_gpus, default=0)
    leaf_number = {leaf: number for number, leaf in enumerate(sorted(fabric.pod_of_leaf, key=natural_key))}
    pod_number = {pod: number for number, pod in enumerate(sorted({*fabric.pod_of_leaf.values()}, key=natural_key))}
    pod_of_leaf = np.array([pod_number[fabric.pod_of_leaf[leaf]] for leaf in leaf_number] or [0], dtype=np.int32)
    shape = (len(nodes), width)
    rail, leaf = np.full(shape, NOWHERE, np.int32), np.full(shape, NOWHERE, np.int32)
    # Nodes of one leaf look alike, so few different ones are worked out.
    known: dict[object, tuple[np.ndarray, np.ndarray]] = {}
    cut: list[str] = []
    for index, (name, count) in enumerate(zip(nodes, num_gpus, strict=True)):
        node = fabric.nodes[name]
        kind = (node.leaves, node.rail_of_gpu, node.down_rails, count)
        if kind not in known:
            known[kind] = _rails_and_leaves(node, count, leaf_number, fabric.source)
        rail[index, :count], leaf[index, :count] = known[kind]
        if None in node.leaves or node.down_rails:
            cut.append(name)
    domains: dict[str, int] = {}
    domain = [domains.setdefault(_domain_name(fabric.nodes[name]), len(domains)) for name in nodes]
    pod = np.where(leaf == NOWHERE, NOWHERE, pod_of_leaf[leaf])
    return Places(
        tuple(nodes), np.array(domain, dtype=np.int32), rail, leaf, pod, tuple(leaf_number), tuple(pod_number),
        tuple(_notes(fabric, nodes, cut)),
    )  # fmt: skip


def natural_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts n2 before n10."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)


def _rails_and_leaves(
    node: FabricNode, count: int, leaf_number: dict[str, int], source: str
) -> tuple[np.ndarray, np.ndarray]:
    """Rail and leaf of each of the first `count` GPUs."""
    known = count if node.rail_of_gpu is None else len(node.rail_of_gpu)
    if known < count:
        raise ConfigError(
            f"{count} ranks run on {node.name}, but the fabric from {source} knows the rails of {known} GPUs there"
        )
    rails = [node.rail(gpu) for gpu in range(count)]
    of_node = sorted({*rails}) if node.is_leaf_set else range(len(node.leaves))
    missing = [rail for rail in rails if rail not in of_node]
    if missing:
        raise ConfigError(
            f"a GPU of {node.name} takes rail {missing[0]}, but the fabric from {source} has only the rails "
            f"0 to {len(node.leaves) - 1} there; it has to say the rail of each GPU"
        )
    working = [rail for rail in of_node if node.leaf(rail) is not None]
    if working:
        rails = [min(working, key=lambda other: (abs(other - rail), other)) for rail in rails]
    leaves = [node.leaf(rail) for rail in rails]
    unknown = [leaf for leaf in leaves if leaf is not None and leaf not in leaf_number]
    if unknown:
        raise ConfigError(f"{node.name} hangs on {unknown[0]}, which is not among the leaves of {source}")
    numbers = [NOWHERE if leaf is None else leaf_number[leaf] for leaf in leaves]
    return np.array(rails, dtype=np.int32), np.array(numbers, dtype=np.int32)


def _domain_name(node: FabricNode) -> str:
    return f"node {node.name}" if node.nvlink_domain is None else f"domain {node.nvlink_domain}"


def _notes(fabric: Fabric, nodes: Sequence[str], cut: list[str]) -> list[str]:
    notes = []
    if not fabric.are_rails_known and any(fabric.nodes[node].rail_of_gpu is None for node in nodes):
        notes.append(f"GPU i is assumed on rail i where {fabric.source} does not tell the rails")
    shared = Counter(fabric.nodes[node].nvlink_domain for node in nodes)
    domains = [f"{name} ({count} nodes)" for name, count in shared.items() if name is not None and count > 1]
    if domains:
        more = ", ..." if len(domains) > 8 else ""
        notes.append(f"the nodes of an NVLink domain count as one node: {', '.join(domains[:8])}{more}")
    if cut:
        notes.append(
            f"links are down on {', '.join(cut[:8])}{', ...' if len(cut) > 8 else ''}: the GPUs of such a rail are "
            "counted on the nearest rail of their node that works"
        )
    return notes

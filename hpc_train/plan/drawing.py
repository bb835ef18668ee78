"""What of a fabric is drawn for a run, and in which box: nodes that share leaves together, boxes by pod."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpc_train.cluster.fabric import Fabric, FabricNode

NO_LINK = "no link works"


@dataclass(frozen=True)
class Drawing:
    """Nodes in boxes, boxes in pods.

    box_of_node: a number into boxes. boxes: label, and number of the pod, of each. pods: labels.
    """

    nodes: tuple[FabricNode, ...]
    box_of_node: tuple[int, ...]
    boxes: tuple[tuple[str, int], ...]
    pods: tuple[str, ...]


def draw_nodes(names: Sequence[str]) -> Drawing:
    """Nodes of which only the names are known: all in one box."""
    nodes = tuple(FabricNode(name, ()) for name in names)
    return Drawing(nodes, (0,) * len(nodes), (("", 0),), ("",))


def draw_fabric(fabric: Fabric, allocated: Collection[str]) -> Drawing:
    """The leaves that allocated nodes hang on, with their other nodes; what else a pod has is counted in its label."""
    leaf_of = _joined_leaves(fabric)
    members: dict[str | None, list[FabricNode]] = {}
    for node in fabric.nodes.values():
        members.setdefault(_box_of(node, leaf_of), []).append(node)
    shown = {first: nodes for first, nodes in members.items() if any(node.name in allocated for node in nodes)}
    pod_names = _pods_in_order(fabric, [first for first in shown if first is not None])
    hidden = Counter(fabric.pod_of_leaf[first] for first in members if first is not None and first not in shown)
    pods = [_pod_label(name, hidden[name]) for name in pod_names]
    if None in shown:
        pods.append(NO_LINK)
    boxes, nodes, box_of_node = [], [], []
    by_pod = sorted(shown, key=lambda first: _pod_number(fabric, pod_names, first))
    for first in by_pod:
        number = _pod_number(fabric, pod_names, first)
        boxes.append(
            ("" if first is None else _box_label([leaf for leaf in leaf_of if leaf_of[leaf] == first]), number)
        )
        nodes += shown[first]
        box_of_node += [len(boxes) - 1] * len(shown[first])
    return Drawing(tuple(nodes), tuple(box_of_node), tuple(boxes), tuple(pods))


def _box_of(node: FabricNode, leaf_of: Mapping[str, str]) -> str | None:
    """The leaf by which a node's box is known; None where no link works."""
    return next((leaf_of[leaf] for leaf in node.leaves if leaf is not None), None)


def _joined_leaves(fabric: Fabric) -> dict[str, str]:
    """For each leaf with nodes the first of those that it shares nodes with: they are drawn as one box."""
    parent: dict[str, str] = {}

    def root(leaf: str) -> str:
        while parent[leaf] != leaf:
            parent[leaf] = parent[parent[leaf]]
            leaf = parent[leaf]
        return leaf

    for node in fabric.nodes.values():
        working = [leaf for leaf in node.leaves if leaf is not None]
        for leaf in working:
            parent.setdefault(leaf, leaf)
            parent[root(leaf)] = root(working[0])
    return {leaf: root(leaf) for leaf in parent}


def _pods_in_order(fabric: Fabric, leaves: Sequence[str]) -> list[str]:
    """Pods that have something to draw, those of one core together."""
    shown = {fabric.pod_of_leaf[leaf] for leaf in leaves}
    order = [pod for pod in dict.fromkeys(fabric.pod_of_leaf.values()) if pod in shown]
    cores = [*dict.fromkeys(fabric.core_of_pod.get(pod, pod) for pod in order)]
    return sorted(order, key=lambda pod: cores.index(fabric.core_of_pod.get(pod, pod)))


def _pod_number(fabric: Fabric, pod_names: list[str], leaf: str | None) -> int:
    return len(pod_names) if leaf is None else pod_names.index(fabric.pod_of_leaf[leaf])


def _pod_label(name: str, num_hidden: int) -> str:
    return f"{name} (and {num_hidden} leaves without ranks)" if num_hidden else name


def _box_label(leaves: Sequence[str]) -> str:
    """The leaf's name, or what the names of a leaf set have in common in whole parts: p0.l3 of p0.l3.r0 to p0.l3.r7."""
    if len(leaves) == 1:
        return leaves[0]
    common = []
    for parts in zip(*(re.findall(r"[^._:/-]+[._:/-]?", leaf) for leaf in leaves), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return "".join(common).rstrip("._:/-") or f"{leaves[0]} to {leaves[-1]}"

"""Whole nodes in the order of the switches that they hang on, for programs whose groups are not known."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.fabric import Fabric


def in_topology_order(allocation: Allocation, fabric: Fabric | None) -> Allocation:
    """The same nodes, those of one pod together, and in it those of one NVLink domain and of one leaf.

    Pods, domains and leaves come in the order in which the allocation names them first, so neighbours stay neighbours
    where they were. Nodes that the fabric does not have come last.
    """
    if fabric is None:
        return allocation
    numbers: dict[Hashable, int] = {}

    def number(kind: str, name: str | None) -> int:
        return numbers.setdefault((kind, name), len(numbers))

    def key(index: int) -> tuple[int, ...]:
        node = fabric.nodes.get(allocation.nodes[index])
        leaf = None if node is None else next((leaf for leaf in node.leaves if leaf is not None), None)
        if node is None or leaf is None:
            return (1,)
        pod = fabric.pod_of_leaf[leaf]
        near = number("domain", node.nvlink_domain) if node.nvlink_domain is not None else number("leaf", leaf)
        return (0, number("core", fabric.core_of_pod.get(pod, pod)), number("pod", pod), near, number("leaf", leaf))

    # Keys are made in the allocation's order before anything is sorted: the numbers follow it.
    keys = [key(index) for index in range(len(allocation.nodes))]
    order = sorted(range(len(keys)), key=lambda index: keys[index])
    return replace(
        allocation,
        nodes=tuple(allocation.nodes[index] for index in order),
        tasks_per_node=tuple(allocation.tasks_per_node[index] for index in order),
        gpus_per_node=tuple(allocation.gpus_per_node[index] for index in order),
    )

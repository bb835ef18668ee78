"""Small fabrics and allocations for tests: pods of leaf sets with so many nodes each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.fabric import Fabric, FabricNode


def make_allocation(nodes: Sequence[str], tasks: int | Sequence[int] = 8) -> Allocation:
    counts = tuple([tasks] * len(nodes) if isinstance(tasks, int) else tasks)
    return Allocation(tuple(nodes), counts, counts, "1", "test")


def make_fabric(
    pods: Sequence[Sequence[int]], names: Sequence[str] | None = None, rails: int | None = None, **further: Any
) -> Fabric:
    """pods: nodes of each leaf of each pod. names: of all nodes, by place. rails: true ones; None: leaf sets."""
    remaining = iter(names if names is not None else [f"n{index}" for index in range(sum(map(sum, pods)))])
    nodes: dict[str, FabricNode] = {}
    pod_of_leaf: dict[str, str] = {}
    for pod, sizes in enumerate(pods):
        for leaf, size in enumerate(sizes):
            name = f"p{pod}l{leaf}"
            leaves = (name,) if rails is None else tuple(f"{name}r{rail}" for rail in range(rails))
            pod_of_leaf.update(dict.fromkeys(leaves, f"p{pod}"))
            for _ in range(size):
                node = next(remaining)
                nodes[node] = FabricNode(node, leaves)
    cores = {f"p{pod}": "core" for pod in range(len(pods))}
    return Fabric(nodes, pod_of_leaf, cores, "test", are_rails_known=rails is not None, **further)

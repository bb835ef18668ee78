"""Whole nodes in the order of their switches."""

from __future__ import annotations

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.fabric import Fabric, FabricNode
from hpc_train.plan.node_order import in_topology_order


def make_fabric(
    leaf_of: dict[str, str | None], pod_of_leaf: dict[str, str], domains: dict[str, str] | None = None
) -> Fabric:
    nodes = {name: FabricNode(name, (leaf,), 2, None, (domains or {}).get(name)) for name, leaf in leaf_of.items()}
    return Fabric(nodes, pod_of_leaf, dict.fromkeys(pod_of_leaf.values(), "core"), "a test")


def order(fabric: Fabric | None, *nodes: str) -> str:
    tasks = tuple(range(1, len(nodes) + 1))
    allocation = Allocation(nodes, tasks, tasks, "7", "a test")
    ordered = in_topology_order(allocation, fabric)
    assert dict(zip(ordered.nodes, ordered.tasks_per_node, strict=True)) == dict(zip(nodes, tasks, strict=True))
    return " ".join(ordered.nodes)


def test_interleaved_nodes_are_sorted_by_leaf_and_a_ring_crosses_twice_instead_of_four_times() -> None:
    """FC-47"""
    leaf_of: dict[str, str | None] = {"n1": "l1", "n2": "l2", "n3": "l1", "n4": "l2"}
    fabric = make_fabric(leaf_of, {"l1": "p", "l2": "p"})

    def crossings(nodes: list[str]) -> int:
        return sum(leaf_of[a] != leaf_of[b] for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True))

    assert crossings(["n1", "n2", "n3", "n4"]) == 4
    assert crossings(order(fabric, "n1", "n2", "n3", "n4").split()) == 2


def test_pods_come_before_leaves_and_what_comes_first_stays_first() -> None:
    leaf_of: dict[str, str | None] = {"a": "l3", "b": "l1", "c": "l2", "d": "l3", "e": "l1"}
    fabric = make_fabric(leaf_of, {"l1": "p1", "l2": "p2", "l3": "p2"})
    assert order(fabric, "a", "b", "c", "d", "e") == "a d c b e"


def test_nodes_of_one_nvlink_domain_stay_together_and_then_come_those_of_the_same_leaf() -> None:
    leaf_of: dict[str, str | None] = {"a": "l1", "b": "l2", "c": "l1", "d": "l2"}
    fabric = make_fabric(leaf_of, {"l1": "p", "l2": "p"}, {"a": "rack", "d": "rack"})
    assert order(fabric, "a", "b", "c", "d") == "a d c b"


def test_without_a_fabric_and_for_unknown_nodes_nothing_is_invented() -> None:
    fabric = make_fabric({"b": "l1", "c": None, "d": "l1"}, {"l1": "p"})
    assert order(None, "b", "a") == "b a"
    assert order(fabric, "x", "b", "c", "d") == "b d x c"

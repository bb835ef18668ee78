"""Where nodes stand to each other."""

from __future__ import annotations

import pytest

from hpc_train.cluster.fabric import Fabric, FabricNode

PODS = {"pod0.leaf0": "pod0", "pod0.leaf1": "pod0", "pod1.leaf0": "pod1"}


def make_fabric(**further: object) -> Fabric:
    nodes = {"n0": "pod0.leaf0", "n1": "pod0.leaf0", "n2": "pod0.leaf1", "n3": "pod1.leaf0"}
    by_name = {name: FabricNode(name, (leaf,)) for name, leaf in nodes.items()}
    return Fabric(by_name, PODS, {"pod0": "core", "pod1": "core"}, "test", **further)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "rail", "tier"),
    [("n0", 5, "node"), ("n1", 0, "leaf"), ("n1", 1, "spine"), ("n2", 0, "spine"), ("n3", 0, "core")],
)
def test_a_transfer_climbs_as_high_as_leaf_and_rail_demand(other: str, rail: int, tier: str) -> None:
    assert make_fabric().tier("n0", 0, other, rail) == tier


def test_oversubscription_makes_a_tier_dearer() -> None:
    fabric = make_fabric(spine_oversubscription=2.0, core_oversubscription=4.0)
    assert fabric.hop_weights == {"node": 0, "leaf": 1000, "spine": 6000, "core": 20000}


def test_nodes_of_one_nvlink_domain_are_as_near_as_one_node() -> None:
    nodes = {name: FabricNode(name, (leaf,), nvlink_domain="rack") for name, leaf in (("a", "l0"), ("b", "l1"))}
    assert Fabric(nodes, {"l0": "p", "l1": "p"}, {}, "test").tier("a", 0, "b", 3) == "node"


def test_a_rail_without_a_working_link_reaches_no_other_node() -> None:
    nodes = {"a": FabricNode("a", ("l0", None)), "b": FabricNode("b", ("l0", "l1"))}
    with pytest.raises(ValueError, match="rail 1 of a"):
        Fabric(nodes, {"l0": "p", "l1": "p"}, {}, "test").tier("a", 1, "b", 1)

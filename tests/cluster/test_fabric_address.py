"""FC-46: SLURM_TOPOLOGY_ADDR of each node, split by its pattern and put together over all nodes."""

from __future__ import annotations

import pytest

from hpc_train.cluster.fabric_address import fabric_from_addresses, split_address
from hpc_train.errors import ConfigError

PATTERN = "switch.switch.node"


@pytest.mark.parametrize(
    ("address", "pattern", "node", "switches"),
    [
        ("spine.leaf1.a1b03", "switch.switch.node", "a1b03", (("spine",), ("leaf1",))),
        ("n-1", "node", "n-1", ()),
        ("", "", "n1", ()),
        ("leaf1.n1.dom", "switch.node", "n1.dom", (("leaf1",),)),
        ("core.s[1-2].leaf1.n1", "switch.switch.switch.node", "n1", (("core",), ("s1", "s2"), ("leaf1",))),
        # An uneven tree: no switch of the middle level leads to this node.
        ("core..leaf1.n1", "switch.switch.switch.node", "n1", (("core",), ("leaf1",))),
        ("b8.tux1", "block.node", "tux1", (("b8",),)),
    ],
)
def test_an_address_is_split_by_its_pattern(
    address: str, pattern: str, node: str, switches: tuple[tuple[str, ...], ...]
) -> None:
    assert split_address(address, pattern, node) == switches
    assert split_address(address, pattern) == switches


@pytest.mark.parametrize(
    ("address", "pattern", "node"),
    [
        ("leaf1.n1", "switch.node", "n2"),
        ("a.leaf1.n1", "switch.node", "n1"),  # a switch whose name holds a dot cannot be told apart
        ("n1", "switch.node", "n1"),
        ("leaf1.n1", "switch.rack.node", "n1"),
        ("leaf[1.n1", "switch.node", "n1"),
    ],
)
def test_an_address_that_does_not_fit_is_refused(address: str, pattern: str, node: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_TOPOLOGY_ADDR"):
        split_address(address, pattern, node)


def test_two_leaves_are_seen_only_when_all_nodes_are_asked() -> None:
    ways = {"n1": "core.a1.l1", "n2": "core.a1.l1", "n3": "core.a1.l2", "n4": "core.a2.l3"}
    pattern = "switch.switch.switch.node"
    fabric = fabric_from_addresses({node: (f"{way}.{node}", pattern) for node, way in ways.items()})
    assert fabric is not None
    assert [fabric.tier("n1", 0, other, 0) for other in ways] == ["node", "leaf", "spine", "core"]
    alone = fabric_from_addresses({"n1": ("core.a1.l1.n1", pattern)})
    assert alone is not None
    assert list(alone.nodes) == ["n1"]


def test_without_a_topology_there_is_no_fabric() -> None:
    assert fabric_from_addresses({"n1": ("n1", "node"), "n2": ("n2", "node")}) is None
    assert fabric_from_addresses({"n1": ("", ""), "n2": ("", "")}) is None


def test_blocks_become_leaf_sets() -> None:
    fabric = fabric_from_addresses({node: (f"{block}.{node}", "block.node") for node, block in
                                    {"n1": "b1", "n2": "b2", "n3": "b1"}.items()})  # fmt: skip
    assert fabric is not None
    assert [fabric.tier("n1", 0, node, 0) for node in ("n3", "n2")] == ["leaf", "spine"]


def test_leaves_that_always_come_together_are_one_set_and_others_are_refused() -> None:
    both = fabric_from_addresses({node: (f"top.l[1-2].{node}", PATTERN) for node in ("n1", "n2")})
    assert both is not None
    assert both.nodes["n1"].leaves == ("l1,l2",)
    with pytest.raises(ConfigError, match="which leaf of one rail"):
        fabric_from_addresses({"n1": ("top.l[1-2].n1", PATTERN), "n2": ("top.l1.n2", PATTERN)})


def test_a_node_that_alone_has_no_switch_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match="n2 has no switch above it"):
        fabric_from_addresses({"n1": ("l1.n1", "switch.node"), "n2": ("n2", "node")})

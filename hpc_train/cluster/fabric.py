"""The fabric: nodes, the rails of their network cards, and the switches between them, as one frozen value.

A node's GPU of index i talks over rail i unless the network cards say otherwise. Each rail of a node hangs on a leaf;
leaves of a pod meet in its spine switches, and pods meet in the core. Slurm's leaf is a set of such leaves, one for
each rail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TIERS = ("node", "leaf", "spine", "core")
"""How high a transfer has to climb: it stays in a node, passes one leaf, a spine, or the core."""

SWITCHES_PASSED = {"node": 0, "leaf": 1, "spine": 3, "core": 5}
"""Switches that a transfer passes, by the tier that it has to climb to (derived from three tiers)."""

MILLI = 1000


@dataclass(frozen=True)
class FabricNode:
    """A node's place.

    leaves: the leaf of each rail, by rail; None where that rail's link is down. One entry: a leaf set, in which every
    rail has a leaf of its own. num_gpus: None where the source does not say. rail_of_gpu: by GPU index; None: rail i
    for GPU i is assumed. nvlink_domain: nodes of the same name share one domain; None: the node is its own.
    down_rails: of a leaf set, the rails whose link is down.
    """

    name: str
    leaves: tuple[str | None, ...]
    num_gpus: int | None = None
    rail_of_gpu: tuple[int, ...] | None = None
    nvlink_domain: str | None = None
    down_rails: tuple[int, ...] = ()

    def rail(self, gpu: int) -> int:
        """The rail that a GPU's traffic takes."""
        return gpu if self.rail_of_gpu is None else self.rail_of_gpu[gpu]

    def leaf(self, rail: int) -> str | None:
        """The leaf, or leaf set, that a rail hangs on; None where its link is down."""
        if rail in self.down_rails:
            return None
        return self.leaves[0] if self.is_leaf_set else self.leaves[rail]

    @property
    def is_leaf_set(self) -> bool:
        """Whether all rails have the same entry, behind which each has a leaf of its own."""
        return len(self.leaves) == 1


@dataclass(frozen=True)
class Fabric:
    """Nodes and switches.

    nodes: by name. pod_of_leaf: the group of leaves whose traffic meets in the same spines. core_of_pod: the group of
    pods that meet in the same core; a pod that is not in it has nothing above. spine_oversubscription: bandwidth into
    the leaves over that to the spines; core_oversubscription: that into the spines over that to the core.
    leaf_uplinks, pod_uplinks: links upwards that work, where known. link_bytes_per_s: of one link below the switches
    of a tier, where known (leaf: from a node's card to its leaf). are_rails_known: false where rail i for GPU i is
    assumed. rail_nics: what the card of each rail is called on the nodes, where known. source: where this was read.
    notes: for the user.
    """

    nodes: Mapping[str, FabricNode]
    pod_of_leaf: Mapping[str, str]
    core_of_pod: Mapping[str, str]
    source: str
    spine_oversubscription: float = 1.0
    core_oversubscription: float = 1.0
    leaf_uplinks: Mapping[str, int] = field(default_factory=dict)
    pod_uplinks: Mapping[str, int] = field(default_factory=dict)
    link_bytes_per_s: Mapping[str, int] = field(default_factory=dict)
    are_rails_known: bool = False
    rail_nics: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def hop_weights(self) -> dict[str, int]:
        """Thousandths of a hop that a byte pays, by the tier that it climbs to."""
        factors = {"spine": self.spine_oversubscription, "core": self.core_oversubscription}
        return {tier: round(MILLI * SWITCHES_PASSED[tier] * factors.get(tier, 1.0)) for tier in TIERS}

    def tier(self, node: str, rail: int, other: str, other_rail: int) -> str:
        """How high a transfer between a rail of a node and one of another has to climb."""
        here, there = self.nodes[node], self.nodes[other]
        if node == other or (here.nvlink_domain is not None and here.nvlink_domain == there.nvlink_domain):
            return "node"
        leaf, other_leaf = here.leaf(rail), there.leaf(other_rail)
        if leaf is None or other_leaf is None:
            raise ValueError(
                f"no link works on rail {rail if leaf is None else other_rail} of {node if leaf is None else other}"
            )
        if leaf == other_leaf and (rail == other_rail or not here.is_leaf_set):
            return "leaf"
        return "spine" if self.pod_of_leaf[leaf] == self.pod_of_leaf[other_leaf] else "core"

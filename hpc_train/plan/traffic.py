"""What a placement sends where: bytes by tier, byte-hops, and the load on each link group upwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_train.cluster.fabric import MILLI, TIERS, Fabric
from hpc_train.errors import ConfigError
from hpc_train.plan.mesh import AXES, Mesh
from hpc_train.plan.places import NOWHERE, Places, find_places

if TYPE_CHECKING:
    from hpc_train.plan.axis_bytes import AxisTraffic
    from hpc_train.plan.placement import Placement

NODE, LEAF, SPINE, CORE = range(len(TIERS))


@dataclass(frozen=True)
class Transfers:
    """What ranks send each other in a step: sender, receiver and bytes of each entry; a pair may stand there twice."""

    sender: np.ndarray
    receiver: np.ndarray
    num_bytes: np.ndarray


@dataclass(frozen=True)
class Uplink:
    """The links from a leaf's rail to the spines, or from a pod to the core.

    num_links: those that work, None where the fabric does not tell. up_bytes, down_bytes: of one step.
    """

    name: str
    tier: str
    num_links: int | None
    link_bytes_per_s: int | None
    up_bytes: int
    down_bytes: int

    @property
    def num_bytes(self) -> int:
        """In the busier direction."""
        return max(self.up_bytes, self.down_bytes)

    @property
    def seconds(self) -> float | None:
        """How long the busier direction takes with all links evenly used; None where links or speed are not known."""
        if not self.num_links or self.link_bytes_per_s is None:
            return None
        return self.num_bytes / (self.num_links * self.link_bytes_per_s)


@dataclass(frozen=True)
class Traffic:
    """One step's traffic.

    bytes_by_tier: by the tier that a transfer climbs to. byte_hops: bytes times weighted switches. busiest_uplink: the
    one that takes longest, by bytes where speeds are not known; None where nothing climbs above a leaf.
    """

    bytes_by_tier: Mapping[str, int]
    byte_hops: int
    busiest_uplink: Uplink | None


def measure_traffic(placement: Placement, fabric: Fabric, traffic: Sequence[AxisTraffic]) -> Traffic:
    """Measure one step of a placement.

    Raises:
        ConfigError: the fabric has not one of its nodes, or a node that must send has no link that works.
    """
    routed = route(placement, fabric, traffic)
    by_tier = routed.bytes_by_tier()
    return Traffic(by_tier, byte_hops_milli(by_tier, fabric) // MILLI, busiest(routed.uplinks(fabric)))


def byte_hops_milli(bytes_by_tier: Mapping[str, int], fabric: Fabric) -> int:
    """Thousandths of byte-hops."""
    weights = fabric.hop_weights
    return sum(num_bytes * weights[tier] for tier, num_bytes in bytes_by_tier.items())


def busiest(uplinks: Sequence[Uplink]) -> Uplink | None:
    """The uplink that takes longest; by bytes a link, then bytes, where speeds are not known. Ties: by name."""

    def load(uplink: Uplink) -> tuple[float, float, int]:
        a_link = uplink.num_bytes / (uplink.num_links or 1)
        return uplink.seconds or 0.0, a_link, uplink.num_bytes

    return max(uplinks, key=load, default=None)


def transfers(mesh: Mesh, traffic: Sequence[AxisTraffic]) -> Transfers:
    """List who sends how much to whom in one step, by the numbers of ranks."""
    ranks = np.arange(mesh.world_size, dtype=np.int32).reshape([degree for degree in mesh.axes.values()])
    found: list[tuple[np.ndarray, np.ndarray, int]] = []
    for entry in traffic:
        line = np.moveaxis(ranks, AXES.index(entry.axis), 0)
        if len(line) < 2:
            continue
        first, last = line[0], line[-1]
        found.append((line[:-1], line[1:], entry.forward_bytes))
        if entry.pattern == "ring":
            found.append((last, first, entry.forward_bytes))
            continue
        found.append((line[1:], line[:-1], entry.backward_bytes))
        if entry.pattern == "wrap":
            found += [(last, first, entry.forward_bytes), (first, last, entry.backward_bytes)]
        found += [(last, first, entry.ends_bytes), (first, last, entry.ends_bytes)]
    found = [(sender, receiver, num_bytes) for sender, receiver, num_bytes in found if num_bytes]
    none = np.zeros(0, np.int64)
    return Transfers(
        np.concatenate([none, *(sender.ravel() for sender, _, _ in found)]),
        np.concatenate([none, *(receiver.ravel() for _, receiver, _ in found)]),
        np.concatenate([none, *(np.full(sender.size, num_bytes) for sender, _, num_bytes in found)]),
    )


@dataclass(frozen=True)
class Routed:
    """Transfers with the tier that each climbs to (a number, in the order of TIERS) and its ends in the network."""

    transfers: Transfers
    tier: np.ndarray
    places: Places
    node_of_rank: np.ndarray
    gpu_of_rank: np.ndarray

    def bytes_by_tier(self) -> dict[str, int]:
        num_bytes = self.transfers.num_bytes
        return {tier: int(num_bytes[self.tier == number].sum()) for number, tier in enumerate(TIERS)}

    def end(self, of_gpu: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Entries of an array by node and GPU, for some ranks."""
        return of_gpu[self.node_of_rank[ranks], self.gpu_of_rank[ranks]]

    def uplinks(self, fabric: Fabric) -> tuple[Uplink, ...]:
        """The load on each uplink that carries anything, sorted by tier and place."""
        leaves = self._loads(SPINE, self.places.port)
        num_rails = int(self.places.rail.max(initial=0)) + 1
        found = []
        for port, (up, down) in leaves.items():
            leaf, rail = divmod(port, num_rails)
            name = self.places.leaves[leaf]
            links = fabric.leaf_uplinks.get(name)
            found.append(Uplink(f"{name} rail {rail}", "spine", links, fabric.link_bytes_per_s.get("spine"), up, down))
        for pod, (up, down) in self._loads(CORE, self.places.pod).items():
            name = self.places.pods[pod]
            links = fabric.pod_uplinks.get(name)
            found.append(Uplink(name, "core", links, fabric.link_bytes_per_s.get("core"), up, down))
        return tuple(found)

    def _loads(self, lowest_tier: int, of_gpu: np.ndarray) -> dict[int, tuple[int, int]]:
        """Bytes up and down by number, of the transfers that climb to a tier at least."""
        climbs = self.tier >= lowest_tier
        num_bytes = self.transfers.num_bytes[climbs]
        ups = self.end(of_gpu, self.transfers.sender[climbs])
        downs = self.end(of_gpu, self.transfers.receiver[climbs])
        # Two ends on one leaf whose rails differ climb from one of its rails to another, which are different switches.
        numbers, inverse = np.unique(np.concatenate([ups, downs]), return_inverse=True)
        loads = np.zeros((2, len(numbers)), np.int64)
        np.add.at(loads[0], inverse[: len(ups)], num_bytes)
        np.add.at(loads[1], inverse[len(ups) :], num_bytes)
        return {int(number): (int(loads[0, at]), int(loads[1, at])) for at, number in enumerate(numbers)}


def route(placement: Placement, fabric: Fabric, traffic: Sequence[AxisTraffic]) -> Routed:
    """Find the tier that each transfer of a step climbs to."""
    return route_transfers(placement, fabric, transfers(placement.mesh, traffic))


def route_transfers(placement: Placement, fabric: Fabric, listed: Transfers) -> Routed:
    """Find the tier that each of some transfers between ranks climbs to."""
    num_gpus = np.zeros(len(placement.nodes), np.int64)
    np.maximum.at(num_gpus, placement.node_of_rank, placement.gpu_of_rank + 1)
    places = find_places(fabric, placement.nodes, num_gpus.tolist())
    nodes, gpus = placement.node_of_rank, placement.gpu_of_rank

    def both(of_gpu: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        of_rank = of_gpu[nodes, gpus]
        return of_rank[listed.sender], of_rank[listed.receiver]

    domain = places.domain[nodes]
    is_near = domain[listed.sender] == domain[listed.receiver]
    port, other_port = both(places.port)
    pod, other_pod = both(places.pod)
    tier = np.where(pod == other_pod, np.where(port == other_port, LEAF, SPINE), CORE)
    tier[is_near] = NODE
    lost = np.flatnonzero(~is_near & ((port == NOWHERE) | (other_port == NOWHERE)))
    if lost.size:
        rank = int(listed.sender[lost[0]] if port[lost[0]] == NOWHERE else listed.receiver[lost[0]])
        raise ConfigError(no_link(placement.nodes[nodes[rank]], fabric.source))
    return Routed(listed, tier, places, nodes, gpus)


def no_link(node: str, source: str) -> str:
    return (
        f"no link of node {node} works, as {source} says, so its ranks reach no other node. Leave the node out: "
        f"fabric.exclude={node}"
    )

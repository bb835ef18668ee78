"""How evenly a placement's traffic falls on the links of each uplink when switches choose links by a hash.

A switch with several equal ways upwards hashes a flow's addresses and ports, and all of a flow takes one link. Few
large flows then meet on one link while others idle. The hash of a real switch is not known, so a seeded one stands for
it: over many seeds the mean of the busiest link is what is to be expected, and the worst of them what can happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpc_train.cluster.fabric import Fabric
from hpc_train.plan.axis_bytes import AxisTraffic
from hpc_train.plan.placement import Placement
from hpc_train.plan.traffic import CORE, SPINE, route

DEFAULT_SEEDS = tuple(range(16))
_SPREAD, _MIX_1, _MIX_2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True)
class HashedUplink:
    """The upward links of a leaf's rail, or of a pod, and their bytes in one step.

    expected_bytes: on the busiest link, in the mean over the seeds. worst_bytes: with the worst seed.
    """

    name: str
    tier: str
    num_links: int
    num_bytes: int
    expected_bytes: int
    worst_bytes: int

    @property
    def expected_collision(self) -> float:
        """How many times its even share the busiest link carries; 1.0 is perfectly even."""
        return self.expected_bytes * self.num_links / self.num_bytes

    @property
    def worst_collision(self) -> float:
        return self.worst_bytes * self.num_links / self.num_bytes


@dataclass(frozen=True)
class EcmpEstimate:
    """All uplinks that carry anything and whose links are known, and the whole in two numbers.

    expected_s, worst_s: time on the busiest link of all, None where speeds are not known. An uplink
    whose number of links the fabric does not tell is left out.
    """

    uplinks: tuple[HashedUplink, ...]
    expected_s: float | None
    worst_s: float | None

    @property
    def expected_collision(self) -> float:
        """Of the uplinks together, by bytes; 1.0 where nothing climbs."""
        even = sum(uplink.num_bytes / uplink.num_links for uplink in self.uplinks)
        return sum(uplink.expected_bytes for uplink in self.uplinks) / even if even else 1.0

    @property
    def worst_collision(self) -> float:
        """Of the one uplink and seed where it is worst."""
        return max((uplink.worst_collision for uplink in self.uplinks), default=1.0)


def estimate_ecmp(
    placement: Placement,
    fabric: Fabric,
    traffic: Sequence[AxisTraffic],
    *,
    flows_a_pair: int = 1,
    seeds: Sequence[int] = DEFAULT_SEEDS,
) -> EcmpEstimate:
    """Hash one step's flows onto the upward links of leaves and pods.

    Args:
        flows_a_pair: Flows that a sender's bytes to one receiver are split into evenly: queue pairs of a connection.
        seeds: One hash each; the same seeds give the same estimate on every machine.

    Raises:
        ConfigError: the fabric does not fit the placement.
        ValueError: no flow, or no seed.
    """
    if flows_a_pair < 1 or not seeds:
        raise ValueError(
            f"flows_a_pair={flows_a_pair} and {len(seeds)} seeds were given; at least one of each is needed"
        )
    routed = route(placement, fabric, traffic)
    listed = routed.transfers
    num_rails = int(routed.places.rail.max(initial=0)) + 1
    found: list[HashedUplink] = []
    for tier, number, of_gpu in (("spine", SPINE, routed.places.port), ("core", CORE, routed.places.pod)):
        climbs = routed.tier >= number
        sender, receiver, num_bytes = listed.sender[climbs], listed.receiver[climbs], listed.num_bytes[climbs]
        uplink = routed.end(of_gpu, sender)
        names = {
            int(at): _name(int(at), tier, routed.places.leaves, routed.places.pods, num_rails)
            for at in np.unique(uplink)
        }
        links = fabric.leaf_uplinks if tier == "spine" else fabric.pod_uplinks
        counts = {at: links.get(name, 0) for at, (name, _) in names.items()}
        kept = np.array([counts[int(at)] > 0 for at in uplink], dtype=bool)
        hashed = _hash_tier(uplink[kept], sender[kept], receiver[kept], num_bytes[kept], counts, flows_a_pair, seeds)
        for at, (total, expected, worst) in hashed.items():
            found.append(HashedUplink(names[at][1], tier, counts[at], total, expected, worst))
    speeds = fabric.link_bytes_per_s
    is_timed = bool(found) and all(uplink.tier in speeds for uplink in found)
    return EcmpEstimate(
        tuple(found),
        max(uplink.expected_bytes / speeds[uplink.tier] for uplink in found) if is_timed else None,
        max(uplink.worst_bytes / speeds[uplink.tier] for uplink in found) if is_timed else None,
    )


def _name(at: int, tier: str, leaves: Sequence[str], pods: Sequence[str], num_rails: int) -> tuple[str, str]:
    """The switch's name in the fabric's tables, and the name to show."""
    if tier == "core":
        return pods[at], pods[at]
    leaf, rail = divmod(at, num_rails)
    return leaves[leaf], f"{leaves[leaf]} rail {rail}"


def _hash_tier(
    uplink: np.ndarray,
    sender: np.ndarray,
    receiver: np.ndarray,
    num_bytes: np.ndarray,
    num_links: dict[int, int],
    flows_a_pair: int,
    seeds: Sequence[int],
) -> dict[int, tuple[int, int, int]]:
    """By uplink: bytes, and bytes of its busiest link, expected and worst."""
    numbers, at = np.unique(uplink, return_inverse=True)
    if not numbers.size:
        return {}
    links = np.array([num_links[int(number)] for number in numbers], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(links)])
    flow = np.tile(np.arange(flows_a_pair, dtype=np.uint64), len(at))
    pair = sender.astype(np.uint64) << np.uint64(32) | receiver.astype(np.uint64)
    key = _mixed(np.repeat(pair, flows_a_pair) + _SPREAD * (flow + np.uint64(1)))
    share, more = np.divmod(np.repeat(num_bytes, flows_a_pair), flows_a_pair)
    of_flow = share + (flow.astype(np.int64) < more)
    of_uplink = np.repeat(at, flows_a_pair)
    busiest = np.zeros((len(seeds), len(numbers)), np.int64)
    for row, seed in enumerate(seeds):
        hashed = _mixed(key ^ _mixed(np.full(1, seed % (1 << 64), np.uint64)))
        link = first[of_uplink] + (hashed % links[of_uplink].astype(np.uint64)).astype(np.int64)
        loads = np.zeros(int(first[-1]), np.int64)
        np.add.at(loads, link, of_flow)
        busiest[row] = np.maximum.reduceat(loads, first[:-1])
    totals = np.zeros(len(numbers), np.int64)
    np.add.at(totals, at, num_bytes)
    expected, worst = busiest.sum(axis=0) // len(seeds), busiest.max(axis=0)
    return {int(number): (int(totals[row]), int(expected[row]), int(worst[row])) for row, number in enumerate(numbers)}


def _mixed(values: np.ndarray) -> np.ndarray:
    """A hash of 64-bit numbers, modulo 2**64 on every machine.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA'14.
    """
    values = values + _SPREAD
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))

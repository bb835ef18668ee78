"""The output of `ibnetdiscover` as a Fabric: which card of which node hangs on which leaf, and all switches above."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from hpc_train.cluster.fabric import Fabric, FabricNode
from hpc_train.cluster.fabric_tree import MAX_TIERS, pods_and_cores
from hpc_train.cluster.hostlist import natural_order
from hpc_train.cluster.whole_number import whole_number
from hpc_train.errors import ConfigError

# cited: InfiniBand Architecture Specification volume 2, data rate of one lane in Gb/s after encoding.
_LANE_GBPS = {
    "SDR": 2.0, "DDR": 4.0, "QDR": 8.0, "FDR10": 10.0, "FDR": 13.64, "EDR": 25.0, "HDR": 50.0, "NDR": 100.0,
    "XDR": 200.0,
}  # fmt: skip
# cited: the same volume 1: links of 1, 2, 4, 8 and 12 lanes.
_MAX_WIDTH = 12
_SPEED = re.compile(r"([0-9]+)x([A-Z]+[0-9]*)")
_SWITCH = re.compile(r'Switch\s+[0-9]+\s+"(S-[0-9a-fA-F]+)"\s+#\s+"(.*)"')
_ADAPTER = re.compile(r'(?:Ca|Rt)\s+[0-9]+\s+"([HR]-[0-9a-fA-F]+)"')
_PORT = re.compile(
    r'\[[0-9]+\](?:\[ext [0-9]+\])?\s+"([SHR]-[0-9a-fA-F]+)"\[[0-9]+\](?:\[ext [0-9]+\])?(?:\([0-9a-fA-F]+\))?'
    r'\s+#\s+"(.*)"\s+lid [0-9]+(?:\s+([0-9]+x[A-Z]+[0-9]*))?'
)
_PASSED_OVER = (
    "vendid=", "devid=", "sysimgguid=", "switchguid=", "caguid=", "rtguid=", "Chassis ", "ChassisNum ", "Hostguid",
)  # fmt: skip
# cited: the node description of the device inside each NVIDIA switch that reduces data on its way (SHARP).
_INSIDE_A_SWITCH = "Aggregation Node"


class Link(NamedTuple):
    """A port of a switch and what is at its other end. told: the other end's description. gbps: None if unknown."""

    switch: str
    other: str
    told: str
    gbps: float | None
    line: int


@dataclass
class _Seen:
    """The switches with their descriptions, the links of each, and the adapters."""

    switches: dict[str, str] = field(default_factory=dict)
    links: dict[str, list[Link]] = field(default_factory=dict)
    adapters: set[str] = field(default_factory=set)


def read_ibnetdiscover(
    text: str, source: str, *, nodes: Collection[str] | None = None, cards: Sequence[str] = ()
) -> Fabric:
    """Read which leaf each card hangs on, and put the switches into tiers by their distance from the nodes.

    A card's rail is its place among the cards' names, mlx5_2 before mlx5_10; the same for all nodes.

    Args:
        nodes: the cluster's nodes. Other hosts, as of storage, are left out then; None: every host is a node.
        cards: the cards that are rails, in their order; empty: all.

    Raises:
        ConfigError: with the line, what is malformed or cut off; links that are no tree of tiers; a card with two
            leaves.
    """
    seen = _parse(text, source)
    names = _switch_names(seen)
    leaves_of_card, speeds, notes = _cards(seen, names, source, nodes, cards)
    present = {card for by_card in leaves_of_card.values() for card in by_card}
    rail_nics = tuple(cards) or tuple(sorted(present, key=natural_order))
    leaves = dict.fromkeys(leaf for by_card in leaves_of_card.values() for leaf in by_card.values())
    parents, dropped = _tiers(seen, names, list(leaves), source)
    pod_of_leaf, core_of_pod = pods_and_cores(list(leaves), parents)
    counts = _count_links(seen, names, speeds, parents, pod_of_leaf)
    rails = [Counter(leaves_of_card[name].get(card) is None for name in leaves_of_card)[True] for card in rail_nics]
    for card, missing in zip(rail_nics, rails, strict=True):
        if missing:
            notes.append(f"{missing} of {len(leaves_of_card)} nodes have no link by {card}")
    if dropped:
        notes.append(f"{dropped} switches join no nodes and no two pods, and are left out")
    notes.append("InfiniBand tells the rail of each card, not which GPU uses which card")
    return Fabric(
        nodes={
            name: FabricNode(name, tuple(by_card.get(card) for card in rail_nics))
            for name, by_card in leaves_of_card.items()
        },
        pod_of_leaf=pod_of_leaf,
        core_of_pod=core_of_pod,
        source=source,
        spine_oversubscription=counts.spine_ratio,
        core_oversubscription=counts.core_ratio,
        leaf_uplinks=counts.leaf_uplinks,
        pod_uplinks=counts.pod_uplinks,
        link_bytes_per_s=counts.link_bytes_per_s,
        rail_nics=rail_nics,
        notes=tuple(notes),
    )


def _parse(text: str, source: str) -> _Seen:
    seen = _Seen()
    switch: str | None = None
    links: list[Link] = []
    wanted: dict[str, int] = {}
    match_port = _PORT.match
    # A quarter of a million lines for ten thousand cards: the frequent kinds come first.
    for number, line in enumerate(text.splitlines(), 1):
        first = line[:1]
        if first == "[":
            if switch is None:
                continue  # A port of an adapter: its switch tells the same.
            match = match_port(line)
            if match is None:
                raise _refuse(source, number, f"this is not a port of a switch: {line[:80]!r}")
            other, told, speed = match.groups()
            try:
                gbps = _gbps(speed)
            except ValueError as error:
                raise _refuse(source, number, str(error)) from None
            if other not in wanted:
                wanted[other] = number
            links.append(Link(switch, other, told, gbps, number))
        elif not first or first == "#":
            continue
        elif line.startswith("Switch"):
            match = _SWITCH.match(line)
            if match is None or match[1] in seen.switches:
                raise _refuse(source, number, f"this is not a switch, or one that is there already: {line[:80]!r}")
            switch = match[1]
            links = []
            seen.switches[switch], seen.links[switch] = match[2], links
        elif line.startswith(("Ca", "Rt")):
            match = _ADAPTER.match(line)
            if match is None:
                raise _refuse(source, number, f"this is not an adapter: {line[:80]!r}")
            switch = None
            seen.adapters.add(match[1])
        elif not line.startswith(_PASSED_OVER) and not line.isspace():
            raise _refuse(source, number, f"ibnetdiscover does not print such a line: {line[:80]!r}")
    if not seen.switches:
        raise ConfigError(f"{source}: it describes no switch; is it the output of ibnetdiscover?")
    for other, number in wanted.items():
        if other not in seen.switches and other not in seen.adapters:
            raise _refuse(source, number, f"{other} is linked here but not described: the file is cut off")
    return seen


def _switch_names(seen: _Seen) -> dict[str, str]:
    """Their descriptions, with the GUID behind those that several have."""
    counts = Counter(seen.switches.values())
    return {guid: told if counts[told] == 1 else f"{told} {guid}" for guid, told in seen.switches.items()}


def _cards(
    seen: _Seen, names: Mapping[str, str], source: str, nodes: Collection[str] | None, cards: Sequence[str]
) -> tuple[dict[str, dict[str, str]], list[float | None], list[str]]:
    """The leaf of each card of each node, from descriptions such as `n1 mlx5_0`; and the speeds of these links."""
    found: dict[str, dict[str, str]] = {}
    lines: dict[tuple[str, str], int] = {}
    speeds: list[float | None] = []
    unnamed: dict[str, str] = {}
    for link in (link for links in seen.links.values() for link in links):
        if link.other[0] != "H" or _INSIDE_A_SWITCH in link.told:
            continue
        words = link.told.split()
        if len(words) != 2:
            unnamed[link.other] = link.told
            continue
        node, card = words
        if nodes is not None and node not in nodes:
            node = node.partition(".")[0]
        if (nodes is not None and node not in nodes) or (cards and card not in cards):
            continue
        leaf = names[link.switch]
        by_card = found.setdefault(node, {})
        if by_card.setdefault(card, leaf) != leaf:
            raise _refuse(
                source,
                link.line,
                f"{card} of {node} hangs on {leaf} here and on {by_card[card]} on line {lines[node, card]}: which of "
                "the two leaves is that rail's is not known. Leave the card out, by naming those that are rails",
            )
        lines.setdefault((node, card), link.line)
        speeds.append(link.gbps)
    if not found:
        raise ConfigError(
            f"{source}: no adapter is named after a node and its card, as in `n1 mlx5_0`"
            + (f"; one of {len(unnamed)} is called {next(iter(unnamed.values()))!r}" if unnamed else "")
        )
    notes = [f"{len(unnamed)} adapters are not named after a node, and are left out"] if unnamed else []
    absent = [] if nodes is None else [node for node in nodes if node not in found]
    if absent:
        notes.append(f"{len(absent)} nodes, such as {absent[0]}, have no card in the fabric")
    return found, speeds, notes


def _tiers(
    seen: _Seen, names: Mapping[str, str], leaves: Sequence[str], source: str
) -> tuple[dict[str, list[str]], int]:
    """The switches right above each, tier by tier from the leaves; and how many switches belong to no tier."""
    neighbours: dict[str, dict[str, int]] = defaultdict(dict)
    for guid, links in seen.links.items():
        for link in links:
            if link.other[0] == "S":
                neighbours[names[guid]][names[link.other]] = link.line
    tier = dict.fromkeys(leaves, 0)
    edge = list(leaves)
    while edge:
        above = []
        for name in edge:
            for other, line in neighbours[name].items():
                if other not in tier:
                    tier[other] = tier[name] + 1
                    if tier[other] >= MAX_TIERS:
                        raise _refuse(
                            source,
                            line,
                            f"{other} is more than {MAX_TIERS - 1} links away from the nodes; no network is",
                        )
                    above.append(other)
                elif tier[other] == tier[name]:
                    raise _refuse(
                        source,
                        line,
                        f"{name} and {other} are both {tier[name]} links away from the nodes and linked to each other, "
                        "so these are no tiers of leaves, spines and cores. If one of them has only hosts that are no "
                        "nodes, as of storage, name the nodes",
                    )
        edge = above
    parents = {name: [other for other in neighbours[name] if tier[other] == tier[name] + 1] for name in tier}
    pod_of_leaf, _ = pods_and_cores(leaves, parents)
    pods_below: dict[str, set[str]] = defaultdict(set)
    for leaf in leaves:
        for spine in parents[leaf]:
            pods_below[spine].add(pod_of_leaf[leaf])
    # Leaves without nodes are two links from those with nodes, as cores are, but see one pod only.
    for name in sorted((name for name in tier if tier[name] >= 2), key=lambda name: tier[name]):
        pods_below[name] = set().union(*(pods_below[other] for other in neighbours[name] if tier[other] < tier[name]))
    idle = {name for name in tier if tier[name] >= 2 and len(pods_below[name]) < 2}
    kept = {name: [other for other in above if other not in idle] for name, above in parents.items()}
    return kept, len(idle) + sum(name not in tier for name in names.values())


@dataclass(frozen=True)
class _Counts:
    spine_ratio: float
    core_ratio: float
    leaf_uplinks: dict[str, int]
    pod_uplinks: dict[str, int]
    link_bytes_per_s: dict[str, int]


def _count_links(
    seen: _Seen,
    names: Mapping[str, str],
    speeds_below: Sequence[float | None],
    parents: Mapping[str, Sequence[str]],
    pod_of_leaf: Mapping[str, str],
) -> _Counts:
    """Links that work, and the bandwidth into each tier over that out of it; links without a speed count as one."""
    up = {name: set(above) for name, above in parents.items()}
    pod_of_spine = {spine: pod for leaf, pod in pod_of_leaf.items() for spine in parents[leaf]}
    leaf_uplinks = dict.fromkeys(pod_of_leaf, 0)
    pod_uplinks = dict.fromkeys(pod_of_leaf.values(), 0)
    speeds: dict[str, list[float | None]] = {"leaf": list(speeds_below), "spine": [], "core": []}
    for guid, links in seen.links.items():
        name = names[guid]
        for link in links:
            if link.other[0] == "S" and names[link.other] in up.get(name, ()):
                if name in pod_of_leaf:
                    leaf_uplinks[name] += 1
                    speeds["spine"].append(link.gbps)
                elif name in pod_of_spine:
                    pod_uplinks[pod_of_spine[name]] += 1
                    speeds["core"].append(link.gbps)
    return _Counts(
        _ratio(speeds["leaf"], speeds["spine"]),
        _ratio(speeds["spine"], speeds["core"]),
        leaf_uplinks,
        pod_uplinks if speeds["core"] else {},
        {tier: round(_usual(known) * 1e9 / 8) for tier, known in speeds.items() if known and None not in known},
    )


def _ratio(down: Sequence[float | None], up: Sequence[float | None]) -> float:
    """At least 1: ports that are not used yet do not make a tier faster."""
    if not down or not up:
        return 1.0
    speeds_known = None not in down and None not in up
    if not speeds_known:
        return max(1.0, round(len(down) / len(up), 3))
    return max(1.0, round(sum(map(float, filter(None, down))) / sum(map(float, filter(None, up))), 3))


def _usual(speeds: Iterable[float | None]) -> float:
    return Counter(speed for speed in speeds if speed is not None).most_common(1)[0][0]


@cache
def _gbps(text: str | None) -> float | None:
    match = _SPEED.fullmatch(text or "")
    if match is None:
        return None
    width = whole_number(match[1], 1, _MAX_WIDTH)
    if width is None:
        raise ValueError(f"a link of the width {match[1][:40]} is none; links have 1 to {_MAX_WIDTH} lanes")
    return width * _LANE_GBPS[match[2]] if match[2] in _LANE_GBPS else None


def _refuse(source: str, number: int, why: str) -> ConfigError:
    return ConfigError(f"{source}, line {number}: {why}")

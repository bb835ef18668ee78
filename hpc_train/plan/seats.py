"""The placement problem in whole numbers: seats for tp groups, their distances, and what the groups send each other.

A block is the tp ranks of one place on the other axes; blocks are numbered row by row over (pp, dp, cp). A seat is a
place for a block: tp slots of one node, or of one NVLink domain where no node is large enough. A host is that node or
domain: between its seats no switch is passed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.fabric import TIERS, Fabric
from hpc_train.errors import ConfigError
from hpc_train.plan.axis_bytes import AxisTraffic
from hpc_train.plan.changes import SizesError, nearest, one_of
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.places import NOWHERE, Places, find_places, natural_key
from hpc_train.plan.traffic import no_link, transfers

MAX_COST_BITS = 61


@dataclass(frozen=True)
class Seats:
    """Seats in the order of the switches: by core, pod, leaf, then host.

    node, gpu: by seat and tp rank, index into the allocation's nodes and slot. host: by seat. kind: by seat; seats of
    one kind hang on the same switches with all their tp ranks. distance: by two kinds, thousandths of hops summed over
    the tp ranks, between different hosts. group, pod: by host; hosts of one group share leaves. notes: for the user.
    """

    node: np.ndarray
    gpu: np.ndarray
    host: np.ndarray
    kind: np.ndarray
    distance: np.ndarray
    group: np.ndarray
    pod: np.ndarray
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.host)

    @property
    def num_hosts(self) -> int:
        return len(self.group)

    def between(self, some: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Distances between seats, pair by pair."""
        found = self.distance[self.kind[some], self.kind[others]]
        return np.where(self.host[some] == self.host[others], 0, found)


@dataclass(frozen=True)
class Edges:
    """What blocks send each other, both ways together: a < b, each pair once.

    weight: bytes of a tp rank, all divided by the same number. is_exact: false where that left remainders, since sums
    could have passed 64 bits.
    """

    a: np.ndarray
    b: np.ndarray
    weight: np.ndarray
    is_exact: bool


def find_edges(mesh: Mesh, traffic: Sequence[AxisTraffic], largest_distance: int) -> Edges:
    """The edges of a mesh; the largest distance of two seats says whether sums stay within 64 bits."""
    blocks = Mesh(pp=mesh.pp, dp=mesh.dp, cp=mesh.cp, tp=1)
    listed = transfers(blocks, [entry for entry in traffic if entry.axis != "tp"])
    low, high = np.minimum(listed.sender, listed.receiver), np.maximum(listed.sender, listed.receiver)
    pairs, inverse = np.unique(low.astype(np.int64) * blocks.world_size + high, return_inverse=True)
    weight = np.zeros(len(pairs), np.int64)
    np.add.at(weight, inverse, listed.num_bytes)
    weight //= max(1, int(np.gcd.reduce(weight, initial=0)))
    bound = int(weight.sum()) * max(1, largest_distance)
    too_many = max(0, bound.bit_length() - MAX_COST_BITS)
    is_exact = not (weight & ((1 << too_many) - 1)).any()
    a, b = np.divmod(pairs, blocks.world_size)
    return Edges(a, b, weight >> too_many, is_exact)


def cost(seats: Seats, edges: Edges, seat_of_block: np.ndarray) -> int:
    """Byte-hops, in thousandths and by the scale of the edges."""
    return int((edges.weight * seats.between(seat_of_block[edges.a], seat_of_block[edges.b])).sum())


def find_seats(mesh: Mesh, allocation: Allocation, fabric: Fabric, exclude: Collection[str] = ()) -> Seats:
    """List the seats of an allocation.

    Raises:
        ConfigError: fewer seats than blocks, a node that the fabric has not, or one that no link reaches.
    """
    kept = [at for at, node in enumerate(allocation.nodes) if node not in exclude and allocation.tasks_per_node[at]]
    counts = [allocation.tasks_per_node[at] for at in kept]
    places = find_places(fabric, [allocation.nodes[at] for at in kept], counts)
    seat_node, seat_gpu = _cut_into_seats(places, counts, mesh.tp)
    num_blocks = mesh.world_size // mesh.tp
    if len(seat_node) < num_blocks:
        raise too_few_seats(mesh, [allocation.nodes[at] for at in kept], counts, len(seat_node))
    group = _groups_of_nodes(places)
    order = _order_of_switches(fabric, places, group, seat_node[:, 0])
    seat_node, seat_gpu = seat_node[order], seat_gpu[order]
    host = _renumber(places.domain[seat_node[:, 0]])
    first_seat = np.unique(host, return_index=True)[1]
    first_node = seat_node[first_seat, 0]
    if len(first_seat) > 1:
        lost = np.flatnonzero(places.port[seat_node, seat_gpu].min(axis=1) == NOWHERE)
        if lost.size:
            raise ConfigError(no_link(places.nodes[seat_node[lost[0], 0]], fabric.source))
    kind, distance = _distances(places, fabric, seat_node, seat_gpu)
    return Seats(
        node=np.array(kept, dtype=np.int32)[seat_node], gpu=seat_gpu, host=host, kind=kind, distance=distance,
        group=_renumber(group[first_node]), pod=_renumber(places.pod[first_node, 0]), notes=places.notes,
    )  # fmt: skip


def _cut_into_seats(places: Places, counts: Sequence[int], tp: int) -> tuple[np.ndarray, np.ndarray]:
    """Node and slot of each tp rank of each seat. Where no node of a domain is large enough, its slots are joined."""
    of_domain: dict[int, list[int]] = {}
    for node, domain in enumerate(places.domain.tolist()):
        of_domain.setdefault(domain, []).append(node)
    nodes: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    for members in of_domain.values():
        is_inside = max(counts[node] for node in members) >= tp
        for joined in [[node] for node in members] if is_inside else [members]:
            of_slot = np.repeat(joined, [counts[node] for node in joined])
            slot = np.concatenate([np.arange(counts[node]) for node in joined])
            whole = len(slot) // tp * tp
            nodes.append(of_slot[:whole].reshape(-1, tp))
            slots.append(slot[:whole].reshape(-1, tp))
    return np.concatenate(nodes).astype(np.int32), np.concatenate(slots).astype(np.int32)


def too_few_seats(
    mesh: Mesh, nodes: Sequence[str], counts: Sequence[int], num_seats: int, note: str = ""
) -> SizesError:
    """What to raise where the nodes hold fewer tp groups than a mesh has. note: said behind the advice."""
    largest = max(counts, default=0)
    fits = [degree for degree in range(1, largest + 1) if all(count % degree == 0 for count in counts)]
    changes = one_of("parallel.tp", nearest(fits, mesh.tp))
    words = " or ".join(map(str, fits))
    if mesh.tp > largest:
        return SizesError(
            f"tp={mesh.tp} does not fit into a node: the largest of the {len(nodes)} nodes has {largest} ranks, and a "
            f"tp group stays inside one node, or one NVLink domain.{note}",
            changes,
            f"Use tp={words or 1}.",
        )
    short = [f"{node} ({count})" for node, count in zip(nodes, counts, strict=True) if count % mesh.tp]
    needed = mesh.world_size // mesh.tp
    over = f", and ranks are left over on {', '.join(short[:8])}{', ...' if len(short) > 8 else ''}" if short else ""
    return SizesError(
        f"a mesh of {mesh.describe()} needs {needed} tp groups of {mesh.tp}, each inside one node, but the "
        f"{len(nodes)} nodes hold {num_seats}{over}.{note}",
        changes,
        f"Use tp={words}, or a mesh of {num_seats * mesh.tp} ranks.",
    )


def _groups_of_nodes(places: Places) -> np.ndarray:
    """A number for the nodes that share leaves, directly or through others."""
    label = np.arange(len(places.nodes))
    port = places.port
    while True:
        before = label.copy()
        for column in port.T:
            there = np.flatnonzero(column != NOWHERE)
            if there.size:
                inverse = np.unique(column[there], return_inverse=True)[1]
                lowest = np.full(inverse.max() + 1, len(label))
                np.minimum.at(lowest, inverse, label[there])
                label[there] = lowest[inverse]
        if (label == before).all():
            return label


def _order_of_switches(fabric: Fabric, places: Places, group: np.ndarray, node_of_seat: np.ndarray) -> np.ndarray:
    """Seats by core, pod, group of leaves, then the name of the host's first node."""
    lowest_leaf = {int(number): len(places.leaves) for number in group}
    for node, number in enumerate(group.tolist()):
        used = places.leaf[node][places.leaf[node] != NOWHERE]
        lowest_leaf[number] = min([lowest_leaf[number], *used.tolist()])
    by_name = sorted(range(len(places.nodes)), key=lambda node: natural_key(places.nodes[node]))
    name_rank = np.empty(len(by_name), np.int64)
    name_rank[by_name] = np.arange(len(by_name))
    cores = sorted({*fabric.core_of_pod.values()}, key=natural_key)
    number_of_core = {core: number for number, core in enumerate(cores)}
    above = [number_of_core.get(fabric.core_of_pod.get(pod, ""), len(cores)) for pod in places.pods]
    core_of_pod = np.array(above or [0])
    pod = places.pod[:, 0]
    keys = np.stack([core_of_pod[pod], pod, np.array([lowest_leaf[number] for number in group.tolist()]), name_rank])
    # A domain stays together, at the place of its first node.
    best = np.lexsort(keys[::-1])
    rank_of_node = np.empty(len(best), np.int64)
    rank_of_node[best] = np.arange(len(best))
    of_domain = np.full(int(places.domain.max(initial=0)) + 1, len(best))
    np.minimum.at(of_domain, places.domain, rank_of_node)
    return np.lexsort([rank_of_node[node_of_seat], of_domain[places.domain[node_of_seat]]])


def _distances(
    places: Places, fabric: Fabric, seat_node: np.ndarray, seat_gpu: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Kind of each seat, and distances of kinds."""
    port, pod = places.port[seat_node, seat_gpu], places.pod[seat_node, seat_gpu]
    _, first, kind = np.unique(np.concatenate([port, pod], axis=1), axis=0, return_index=True, return_inverse=True)
    weights = fabric.hop_weights
    leaf, spine, core = (weights[tier] for tier in TIERS[1:])
    distance = np.zeros((len(first), len(first)), np.int64)
    for member in range(seat_node.shape[1]):
        ports, pods = port[first, member], pod[first, member]
        in_pod = np.where(ports[:, None] == ports[None, :], leaf, spine)
        distance += np.where(pods[:, None] == pods[None, :], in_pod, core)
    return kind.ravel().astype(np.int32), distance


def _renumber(labels: np.ndarray) -> np.ndarray:
    """0, 1, ... by first appearance."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[inverse.ravel()]

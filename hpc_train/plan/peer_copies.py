"""Which node keeps a copy of which other node's state, so that a lost node is lost by one of the two. Pure arithmetic.

Each node's state goes to exactly one other node and each node keeps exactly one other's. What the two should not share,
the worst first: a leaf, since its end takes all its nodes; then groups of the mesh along tp, cp, dp and pp, since what
ends one rank of a group often ends others.

1. permutations that are right by construction: rotations of the nodes sorted by leaf, and shifts on the grid of nodes
2. the best of them, and exchanges of two nodes' holders for as long as one is better
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from hpc_train.cluster.fabric import Fabric
from hpc_train.plan.homes import group_numbers
from hpc_train.plan.mesh import AXES
from hpc_train.plan.placement import Placement

COPY_HOLDERS = "copy_holders"
"""In plan.json: by node the one that keeps its copy, both by their numbers."""
_SAME_NODE, _SAME_LEAF = 1 << 16, 1 << 8
"""What a pair costs, in groups that it shares: more than all axes together, each more than the one below."""
_MOST_PARTNERS = 32
"""Tried for each node that is not as it should be; assumed: enough, since most will do. It keeps the work linear."""


@dataclass(frozen=True)
class PeerCopies:
    """holder: by node, in the placement's order, the one that keeps its copy; empty where there is one node only.

    notes: for the user, where copies are nearer than they should be, and why.
    """

    holder: tuple[int, ...]
    notes: tuple[str, ...] = ()


def plan_peer_copies(placement: Placement, fabric: Fabric | None) -> PeerCopies:
    """Give each node of a placement the one that keeps its copy; the same on every machine."""
    num_nodes = len(placement.nodes)
    if num_nodes == 1:
        return PeerCopies((), ("copies are kept on the one node that there is, and are lost with it",))
    nodes = _Nodes(placement, fabric)
    best = min(_candidates(nodes), key=nodes.cost_of_all)
    holder = _exchanged(best, nodes)
    return PeerCopies(tuple(holder), tuple(_notes(holder, nodes)))


class _Nodes:
    """What pairs of nodes share. leaf: by node a number; all 0 where no fabric is known."""

    def __init__(self, placement: Placement, fabric: Fabric | None) -> None:
        self.placement = placement
        self.count = len(placement.nodes)
        self.has_leaves = fabric is not None
        names = ["" if fabric is None else _leaf_of(fabric, node) for node in placement.nodes]
        self.leaf: list[int] = np.unique(names, return_inverse=True)[1].tolist()
        self.axes = [axis for axis in AXES if getattr(placement.mesh, axis) > 1]
        by_rank = placement.node_of_rank.tolist()
        self._groups: list[list[set[int]]] = [[set() for _ in range(self.count)] for _ in self.axes]
        for of_node, axis in zip(self._groups, self.axes, strict=True):
            for node, group in zip(by_rank, group_numbers(placement.mesh, axis).tolist(), strict=True):
                of_node[node].add(group)

    def share(self, axis: str, node: int, other: int) -> bool:
        """Whether some rank of the one is in a group along the axis with some rank of the other."""
        of_node = self._groups[self.axes.index(axis)]
        return not of_node[node].isdisjoint(of_node[other])

    def cost(self, node: int, other: int) -> int:
        if node == other:
            return _SAME_NODE
        shared = sum(not of_node[node].isdisjoint(of_node[other]) for of_node in self._groups)
        return shared + (_SAME_LEAF if self.has_leaves and self.leaf[node] == self.leaf[other] else 0)

    def cost_of_all(self, holder: Sequence[int]) -> tuple[int, int]:
        """How many nodes are within their leaf; how many groups are shared."""
        costs = [divmod(self.cost(node, other), _SAME_LEAF) for node, other in enumerate(holder)]
        return sum(near for near, _ in costs), sum(shared for _, shared in costs)


def _leaf_of(fabric: Fabric, node: str) -> str:
    """The leaf of the first rail that works; nodes that share one share all, as a rule."""
    return next((leaf for leaf in fabric.nodes[node].leaves if leaf is not None), "")


def _candidates(nodes: _Nodes) -> Iterator[list[int]]:
    """Holders by node: each a permutation that leaves no node to itself."""
    every = range(nodes.count)
    largest = max(Counter(nodes.leaf).values())
    # Nobody stays in a leaf that has up to half of the nodes; of a larger one as few as can be.
    by_leaf = sorted(every, key=lambda node: (nodes.leaf[node], node))
    for shift in sorted({min(largest, nodes.count - 1), 1 + (nodes.count - 1) // 2}):
        yield _rotated(by_leaf, shift)
        yield _rotated(list(every), shift)
    grid = _grid(nodes)
    for steps in product(*(sorted({0, 1 % extent, extent // 2}) for extent in grid.shape)):
        shifted = np.roll(grid, [-step for step in steps], range(grid.ndim))
        holder = np.empty(nodes.count, np.int64)
        holder[grid.ravel()] = shifted.ravel()
        if (holder != np.arange(nodes.count)).all():
            yield holder.tolist()


def _rotated(order: Sequence[int], shift: int) -> list[int]:
    holder = [0] * len(order)
    for place, node in enumerate(order):
        holder[node] = order[(place + shift) % len(order)]
    return holder


def _grid(nodes: _Nodes) -> np.ndarray:
    """The nodes by the coordinates of their first ranks; in one line where these do not fill a grid once."""
    placement = nodes.placement
    mesh, every = placement.mesh, range(nodes.count)
    first = np.unique(placement.node_of_rank, return_index=True)[1]
    coords = np.array(np.unravel_index(first, tuple(mesh.axes.values())))
    numbers = [np.unique(row, return_inverse=True)[1] for row in coords]
    shape = tuple(int(row.max()) + 1 for row in numbers)
    place = np.ravel_multi_index(tuple(numbers), shape)
    if len(np.unique(place)) < nodes.count or int(np.prod(shape)) != nodes.count:
        return np.array(every)
    grid = np.empty(nodes.count, np.int64)
    grid[place] = every
    return grid.reshape(shape)


def _exchanged(holder: Sequence[int], nodes: _Nodes) -> list[int]:
    """Holders after exchanges that lower the cost, each of which may only do so."""
    found = list(holder)
    aways = _aways(nodes.count)
    for node in range(nodes.count):
        now = nodes.cost(node, found[node])
        for away in aways if now else ():
            other = (node + away) % nodes.count
            before = now + nodes.cost(other, found[other])
            if nodes.cost(node, found[other]) + nodes.cost(other, found[node]) < before:
                found[node], found[other] = found[other], found[node]
                now = nodes.cost(node, found[node])
    return found


def _aways(count: int) -> list[int]:
    """How far the partners are that are tried: near ones, and some from everywhere."""
    if count <= _MOST_PARTNERS:
        return list(range(1, count))
    half = _MOST_PARTNERS // 2
    return sorted({*range(1, half + 1), *(count * part // (half + 1) for part in range(1, half + 1))})


def _notes(holder: Sequence[int], nodes: _Nodes) -> Iterator[str]:
    names = nodes.placement.nodes
    near = [node for node, other in enumerate(holder) if nodes.leaf[node] == nodes.leaf[other]]
    if nodes.has_leaves and near:
        largest = max(Counter(nodes.leaf).values())
        yield (
            f"the copies of {len(near)} of {nodes.count} nodes, {names[near[0]]} first, are kept on a node of the same "
            f"leaf: {largest} of the nodes hang on one leaf"
        )
    for axis in nodes.axes:
        shared = [node for node, other in enumerate(holder) if nodes.share(axis, node, other)]
        if shared:
            yield (
                f"the copies of {len(shared)} of {nodes.count} nodes, {names[shared[0]]} first, are kept on a node of "
                f"the same {axis} group: no better order was found"
            )

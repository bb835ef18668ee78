"""Which saves are whole on the disks of the nodes at hand, and from which node each part is read. Pure arithmetic."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class FoundPart:
    """A part that a node has.

    step, token: of which save; no two saves have one token. node, num_nodes: whose part, of how many nodes, in that
    save's numbering. at: the node that has it, in today's numbering.
    """

    step: int
    token: str
    node: int
    num_nodes: int
    at: int


@dataclass(frozen=True)
class WholeSet:
    """A save of which every part is at hand.

    at: by the save's node, the node that reads its part today. num_copies: how many nodes have each part, at least.
    """

    step: int
    token: str
    at: tuple[int, ...]
    num_copies: int


@dataclass(frozen=True)
class BrokenSet:
    """A save of which parts are missing."""

    step: int
    token: str
    num_nodes: int
    missing: tuple[int, ...]


def choose_sets(found: Iterable[FoundPart], at_least: int) -> tuple[list[WholeSet], list[BrokenSet]]:
    """The saves of a step of `at_least` or later, the newest first.

    A part that lies on several nodes is read where the node has the number that its own had, which as a rule needs it;
    else on the node that reads fewest parts so far.
    """
    holders: defaultdict[tuple[int, str, int], defaultdict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for part in found:
        if part.step >= at_least and 0 <= part.node < part.num_nodes:
            holders[part.step, part.token, part.num_nodes][part.node].add(part.at)
    whole, broken = [], []
    for (step, token, num_nodes), by_node in sorted(holders.items(), reverse=True):
        missing = tuple(node for node in range(num_nodes) if node not in by_node)
        if missing:
            broken.append(BrokenSet(step, token, num_nodes, missing))
        else:
            num_copies = min(map(len, by_node.values()))
            whole.append(WholeSet(step, token, _readers(by_node, num_nodes), num_copies))
    return whole, broken


def _readers(by_node: dict[int, set[int]], num_nodes: int) -> tuple[int, ...]:
    num_read: Counter[int] = Counter()
    reader = [-1] * num_nodes
    # First those without a choice.
    for node in sorted(range(num_nodes), key=lambda node: (len(by_node[node]), node)):
        own = [node] if node in by_node[node] else by_node[node]
        reader[node] = min(own, key=lambda at: (num_read[at], at))
        num_read[reader[node]] += 1
    return tuple(reader)

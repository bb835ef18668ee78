"""From switches with nodes or other switches below them to a Fabric: what all of Slurm's forms have in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpc_train.cluster.fabric import Fabric, FabricNode
from hpc_train.errors import ConfigError

MAX_TIERS = 64
"""Switches one below the other, at most. assumed: networks have a few tiers, and what looks at them may recurse."""


@dataclass(frozen=True)
class Switch:
    """A switch as a source describes it: nodes below it, or other switches. line: where, 0 if it has none.

    repeated: nodes of the switches below it, where the source lists them once more.
    """

    name: str
    nodes: tuple[str, ...]
    children: tuple[str, ...]
    line: int
    repeated: tuple[str, ...] = ()


def fabric_of_tree(switches: Sequence[Switch], source: str, notes: Sequence[str] = ()) -> Fabric:
    """Take each switch with nodes as a leaf set, and what is above as spines and core.

    Raises:
        ConfigError: a switch is described twice, unknown or below itself, a node is below two leaves, or is said to be
            below a switch and hangs on none of its leaves.
    """
    by_name: dict[str, Switch] = {}
    for switch in switches:
        if switch.name in by_name:
            first = by_name[switch.name].line
            raise _refuse(source, switch, f"the switch {switch.name} is described on line {first} already")
        by_name[switch.name] = switch
    for switch in switches:
        for child in switch.children:
            if child not in by_name:
                raise _refuse(source, switch, f"{switch.name} has the switch {child} below it, which is not described")
    _refuse_loops_and_depths(by_name, source)
    parents: dict[str, list[str]] = defaultdict(list)
    for switch in switches:
        for child in switch.children:
            parents[child].append(switch.name)
    nodes = _nodes(switches, source)
    _refuse_strangers(by_name, source)
    leaves = [switch.name for switch in switches if switch.nodes]
    if not leaves:
        raise ConfigError(f"{source}: no switch has nodes below it")
    pod_of_leaf, core_of_pod = pods_and_cores(leaves, parents)
    tiers = 1 + max(_height(leaf, parents, {}) for leaf in leaves)
    told = [*notes, *_shape_notes(tiers, pod_of_leaf, core_of_pod, source)]
    return Fabric(nodes, pod_of_leaf, core_of_pod, source, notes=tuple(told))


def pods_and_cores(
    leaves: Sequence[str], parents: Mapping[str, Collection[str]]
) -> tuple[dict[str, str], dict[str, str]]:
    """Group leaves that share a switch right above them into pods, and pods that share one further above into cores.

    A group is named after the switches in which it meets, or after its only member.
    """
    pod_of_leaf = group_by_shared({leaf: parents.get(leaf, ()) for leaf in leaves})
    above: dict[str, set[str]] = defaultdict(set)
    first: dict[str, set[str]] = defaultdict(set)
    seen: dict[str, frozenset[str]] = {}
    for leaf in leaves:
        first[pod_of_leaf[leaf]].update(parents.get(leaf, ()))
    for pod, switches in first.items():
        for switch in switches:
            above[pod] |= _ancestors(switch, parents, seen)
    core_of_pod = group_by_shared({pod: sorted(above[pod] | first[pod]) for pod in first}, parents)
    members: dict[str, list[str]] = defaultdict(list)
    for pod, core in core_of_pod.items():
        members[core].append(pod)
    return pod_of_leaf, {
        pod: core for pod, core in core_of_pod.items() if len(members[core]) > 1 or above[pod] - first[pod]
    }


def group_by_shared(
    marks: Mapping[str, Collection[str]], parents: Mapping[str, Collection[str]] | None = None
) -> dict[str, str]:
    """The group of each name: names that share a mark, directly or over others, are in one.

    A group is called by its marks (the first of them and the number of others), with parents only by those that have
    nothing above them.
    """
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while root.setdefault(name, name) != name:
            root[name] = root[root[name]]
            name = root[name]
        return name

    holder: dict[str, str] = {}
    first_with: dict[frozenset[str], str] = {}
    for name, its_marks in marks.items():
        # The leaves of a pod mostly have the very same switches above them.
        root[name] = first_with.setdefault(frozenset(its_marks), name) if its_marks else name
        if root[name] == name:
            for mark in its_marks:
                root[find(name)] = find(holder.setdefault(mark, name))
    its_marks_by_group: dict[str, dict[str, None]] = defaultdict(dict)
    for same, name in first_with.items():
        shown = [mark for mark in sorted(same) if parents is None or not parents.get(mark)]
        its_marks_by_group[find(name)].update(dict.fromkeys(shown))
    called: dict[str, str] = {}
    for group in dict.fromkeys(find(name) for name in marks):
        its = its_marks_by_group[group]
        first, *more = sorted(its) or [group]
        called[group] = f"{first}+{len(more)}" if len(more) > 1 else ",".join([first, *more])
    return {name: called[find(name)] for name in marks}


def _ancestors(switch: str, parents: Mapping[str, Collection[str]], seen: dict[str, frozenset[str]]) -> frozenset[str]:
    if switch not in seen:
        above: set[str] = set()
        for parent in parents.get(switch, ()):
            above |= {parent} | _ancestors(parent, parents, seen)
        seen[switch] = frozenset(above)
    return seen[switch]


def _height(switch: str, parents: Mapping[str, Collection[str]], seen: dict[str, int]) -> int:
    if switch not in seen:
        seen[switch] = max((1 + _height(parent, parents, seen) for parent in parents.get(switch, ())), default=0)
    return seen[switch]


def _nodes(switches: Iterable[Switch], source: str) -> dict[str, FabricNode]:
    found: dict[str, FabricNode] = {}
    leaf_of: dict[str, Switch] = {}
    for switch in switches:
        if switch.nodes and switch.children:
            raise _refuse(source, switch, f"{switch.name} has nodes and switches below it; a switch has one of the two")
        for name in switch.nodes:
            if name in leaf_of:
                other = leaf_of[name]
                raise _refuse(
                    source,
                    switch,
                    f"the node {name} is below {switch.name} and, on line {other.line}, below {other.name}: which of "
                    "the two leaves it hangs on is not known",
                )
            leaf_of[name] = switch
            found[name] = FabricNode(name, (switch.name,))
    return found


def _refuse_loops_and_depths(by_name: Mapping[str, Switch], source: str) -> None:
    """Walk down from every switch; one that is met again on its own way closes a loop."""
    # By switch, how many are one below the other from it down.
    done: dict[str, int] = {}
    for start in by_name:
        way = [(start, iter(by_name[start].children))] if start not in done else []
        while way:
            name, children = way[-1]
            child = next(children, None)
            if child is None:
                done[name] = 1 + max((done[below] for below in by_name[name].children), default=0)
                if done[name] > MAX_TIERS:
                    raise _too_deep(by_name[name], source)
                way.pop()
                continue
            if len(way) > MAX_TIERS:
                raise _too_deep(by_name[way[0][0]], source)
            names = [step for step, _ in way]
            if child in names:
                loop = " -> ".join([*names[names.index(child) :], child])
                raise _refuse(source, by_name[name], f"the switches go in a loop, each below the one before: {loop}")
            if child not in done:
                way.append((child, iter(by_name[child].children)))


def _refuse_strangers(by_name: Mapping[str, Switch], source: str) -> None:
    """Compare the nodes that a source repeats on an upper switch with those of the leaves below it."""
    below: dict[str, frozenset[str]] = {}

    def nodes_below(name: str) -> frozenset[str]:
        if name not in below:
            switch = by_name[name]
            below[name] = frozenset(switch.nodes).union(*map(nodes_below, switch.children))
        return below[name]

    for switch in by_name.values():
        found = nodes_below(switch.name) if switch.repeated else frozenset()
        strange = [name for name in switch.repeated if name not in found]
        if strange:
            more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
            why = f"{switch.name} has {strange[0]}{more} below it, but none of the leaves below {switch.name} has"
            raise _refuse(source, switch, why)


def _too_deep(switch: Switch, source: str) -> ConfigError:
    why = f"below {switch.name} are more than {MAX_TIERS - 1} switches, each below the one before"
    return _refuse(source, switch, f"{why}; networks have a few tiers")


def _shape_notes(
    tiers: int, pod_of_leaf: Mapping[str, str], core_of_pod: Mapping[str, str], source: str
) -> Iterable[str]:
    if tiers > 3:
        yield f"{source} has {tiers} tiers of switches; those above the second are counted as one core"
    pods = dict.fromkeys(pod_of_leaf.values())
    parts = len({core_of_pod.get(pod, f"pod {pod}") for pod in pods})
    if parts > 1:
        yield (
            f"{source} has {parts} parts that no switch joins; traffic between them is counted as if it passed one core"
        )


def _refuse(source: str, switch: Switch, why: str) -> ConfigError:
    return ConfigError(f"{source}, line {switch.line}: {why}" if switch.line else f"{source}: {why}")

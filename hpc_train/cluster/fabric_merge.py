"""Several sources of one fabric put together; where they contradict each other, the first one holds and it is said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc_train.cluster.fabric import Fabric, FabricNode
from hpc_train.cluster.fabric_node import NodeReport
from hpc_train.cluster.hostlist import compress_hostlist, natural_order

_DETAILS = ("num_gpus", "rail_of_gpu", "nvlink_domain")
_SHOWN = 4


def merge_fabrics(first: Fabric, second: Fabric) -> Fabric:
    """Fill what the first does not tell with what the second does.

    Switches are the first's. Only where it has leaf sets and the second has the leaf of each rail, for all of the
    first's nodes, are they the second's, which looked closer.
    """
    common = [name for name in first.nodes if name in second.nodes]
    notes = [*first.notes, *second.notes, *_leaf_contradictions(first, second, common)]
    lacking = len(first.nodes) - len(common)
    if lacking:
        notes.append(f"{second.source} lacks {lacking} of the {len(first.nodes)} nodes of {first.source}")
    is_closer = (
        not lacking
        and all(node.is_leaf_set for node in first.nodes.values())
        and not any(second.nodes[name].is_leaf_set for name in common)
    )
    switches = second if is_closer else first
    nodes = dict(first.nodes)
    differing: dict[str, list[str]] = defaultdict(list)
    for name in common:
        here, there = first.nodes[name], second.nodes[name]
        values = {key: getattr(here, key) for key in _DETAILS}
        for key in _DETAILS:
            other = getattr(there, key)
            if values[key] is None:
                values[key] = other
            elif other is not None and other != values[key]:
                differing[f"{key} is {values[key]} by {first.source}, {other} by {second.source}"].append(name)
        place = switches.nodes[name]
        nodes[name] = replace(place, **values)
    notes += [f"{_few(names)}: {what}; the first is used" for what, names in differing.items()]
    if not is_closer and second.rail_nics and first.rail_nics and first.rail_nics != second.rail_nics:
        notes.append(f"rails are {first.rail_nics} by {first.source}, {second.rail_nics} by {second.source}")
    return replace(
        switches,
        nodes=nodes,
        source=f"{first.source} and {second.source}",
        rail_nics=switches.rail_nics or first.rail_nics or second.rail_nics,
        link_bytes_per_s={**second.link_bytes_per_s, **first.link_bytes_per_s},
        are_rails_known=all(node.rail_of_gpu is not None for node in nodes.values()),
        notes=tuple(dict.fromkeys(notes)),
    )


def merge_reports(fabric: Fabric, reports: Sequence[NodeReport]) -> Fabric:
    """Add what the nodes themselves tell: GPUs, the rail of each GPU's card, NVLink over nodes.

    A card's rail is the one of its name where the fabric has names, else the place of its name among the cards of all
    nodes' GPUs: that cards of one name are on one rail is what a leaf set means.
    """
    names = {card for report in reports for card in report.nics or () if card is not None}
    # A card's device number gives its place, mlx5_2 before mlx5_10.
    rails = fabric.rail_nics or tuple(sorted(names, key=natural_order))
    nodes = dict(fabric.nodes)
    notes: dict[str, list[str]] = defaultdict(list)
    for report in reports:
        node = nodes.get(report.node)
        if node is None:
            continue
        for note in report.notes:
            notes[note].append(report.node)
        nodes[report.node] = _with_report(node, fabric, report, rails, notes)
    told = [f"{_few(names)}: {what}" for what, names in notes.items()]
    known = bool(nodes) and all(
        nodes[report.node].rail_of_gpu is not None for report in reports if report.node in nodes
    )
    return replace(
        fabric,
        nodes=nodes,
        are_rails_known=fabric.are_rails_known or (known and bool(reports)),
        notes=(*fabric.notes, *told),
    )


def with_gpus(fabric: Fabric, gpus: Mapping[str, int]) -> tuple[Fabric, tuple[str, ...]]:
    """Fill in how many GPUs the job has on each node; and a line for those of which the fabric knows fewer."""
    nodes = dict(fabric.nodes)
    short: list[str] = []
    part: list[str] = []
    for name, count in gpus.items():
        node = nodes[name]
        if node.num_gpus is not None and count > node.num_gpus:
            short.append(f"{name} ({count} by Slurm, {node.num_gpus} by {fabric.source})")
        elif node.num_gpus is None and count:
            nodes[name] = replace(node, num_gpus=count)
        elif node.num_gpus is not None and 0 < count < node.num_gpus and node.rail_of_gpu is not None:
            part.append(name)
    if short:
        return fabric, (f"the fabric has fewer GPUs than the job: {', '.join(short[:_SHOWN])}",)
    notes = fabric.notes
    if part:
        notes = (*notes, f"{_few(part)}: the job has a part of the GPUs, which are assumed to be the node's first ones")
    return replace(fabric, nodes=nodes, notes=notes), ()


def _with_report(
    node: FabricNode, fabric: Fabric, report: NodeReport, order: Sequence[str], notes: dict[str, list[str]]
) -> FabricNode:
    changes: dict[str, Any] = {}
    if report.num_gpus:
        if node.num_gpus is None:
            changes["num_gpus"] = report.num_gpus
        elif node.num_gpus != report.num_gpus:
            what = f"{report.num_gpus} GPUs are there, {node.num_gpus} by {fabric.source}; the latter is used"
            notes[what].append(node.name)
            return node
    if report.nvlink_domain is not None:
        if node.nvlink_domain is None:
            changes["nvlink_domain"] = report.nvlink_domain
        elif node.nvlink_domain != report.nvlink_domain:
            notes[f"nvidia-smi and {fabric.source} differ about NVLink's domain; the latter is used"].append(node.name)
    rails = _rails(fabric, report, order, notes)
    if rails is not None:
        if node.rail_of_gpu is None:
            changes["rail_of_gpu"] = rails
        elif node.rail_of_gpu != rails:
            what = f"rails of GPUs are {list(rails)} by its cards, {list(node.rail_of_gpu)} by {fabric.source}"
            notes[f"{what}; the latter is used"].append(node.name)
    return replace(node, **changes)


def _rails(
    fabric: Fabric, report: NodeReport, order: Sequence[str], notes: dict[str, list[str]]
) -> tuple[int, ...] | None:
    if not report.nics:
        return None
    if None in report.nics:
        notes["which card is near to which GPU is not clear, so rail i is assumed for GPU i"].append(report.node)
        return None
    cards = [card for card in report.nics if card is not None]
    strange = sorted(set(cards) - set(order))
    if strange:
        notes[f"the card {strange[0]} is near to a GPU, but no rail of {fabric.source}"].append(report.node)
        return None
    return tuple(order.index(card) for card in cards)


def _leaf_contradictions(first: Fabric, second: Fabric, common: Sequence[str]) -> list[str]:
    """Nodes of one leaf that the other source puts on several, both ways round."""
    found = []
    for one, other in ((first, second), (second, first)):
        split: dict[tuple[str | None, ...], dict[tuple[str | None, ...], str]] = defaultdict(dict)
        for name in common:
            split[one.nodes[name].leaves].setdefault(other.nodes[name].leaves, name)
        torn = [list(names.values()) for names in split.values() if len(names) > 1]
        if torn:
            more = f" (and {len(torn) - 1} more leaves)" if len(torn) > 1 else ""
            found.append(
                f"{' and '.join(torn[0][:2])} share their leaf by {one.source}, but not by {other.source}{more}"
            )
    return found


def _few(names: Sequence[str]) -> str:
    return compress_hostlist(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

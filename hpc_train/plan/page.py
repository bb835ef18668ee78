"""One self-contained HTML page that draws a fabric with the ranks of a run in it: no network, no other file.

The data are written compactly, as numbers that index lists of names; page.js draws them on a canvas and works out
groups and paths itself, so that a page of 16,384 ranks has less than a megabyte.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpc_train.plan.drawing import draw_fabric, draw_nodes
from hpc_train.plan.page_frame import framed_page
from hpc_train.plan.places import NOWHERE, find_places
from hpc_train.plan.table import sections_of

if TYPE_CHECKING:
    from hpc_train.cluster.allocation import Allocation
    from hpc_train.cluster.fabric import Fabric
    from hpc_train.plan.placement import Placement
    from hpc_train.plan.report import PlanReport

_AXIS_MEANING = {
    "pp": "stage (pp)",
    "dp": "replica (dp)",
    "cp": "part of the sequence (cp)",
    "tp": "part of a layer (tp)",
}


def page_html(report: PlanReport) -> str:
    """The page of a report, with its tables beside the drawing."""
    data = {
        "title": report.name,
        "subtitle": f"{report.size}; {report.origin}",
        "axes": list(report.mesh.axes.items()),
        "axisMeaning": _AXIS_MEANING,
        "patterns": {entry.axis: entry.pattern for entry in report.traffic},
        **_placed(report),
    }
    return framed_page("page", report.name, data, sections_of(report), report.all_notes)


def _placed(report: PlanReport) -> dict[str, Any]:
    """The drawn nodes, and for each order the node and GPU of each rank."""
    allocation, fabric = report.allocation, report.fabric
    slots = dict(zip(allocation.nodes, allocation.tasks_per_node, strict=True))
    drawing = draw_nodes(allocation.nodes) if fabric is None else draw_fabric(fabric, slots)
    index = {node.name: number for number, node in enumerate(drawing.nodes)}
    orders = [_order("planned", report.placement, index)]
    if report.is_moved:
        orders.append(_order("Slurm's", report.slurm, index))
    links, pods = ({}, ()) if fabric is None else _links(fabric, allocation)
    domains, kinds = _Numbered(), _Numbered()
    for node in drawing.nodes:
        domains.add(node.nvlink_domain)
        kinds.add(links.get(node.name))
    return {
        "nodes": [node.name for node in drawing.nodes],
        "nodeBox": drawing.box_of_node,
        "nodeGpus": [max(node.num_gpus or 0, slots.get(node.name, 0), 1) for node in drawing.nodes],
        "nodeDomain": domains.numbers,
        "nodeKind": kinds.numbers,
        "kinds": list(kinds.values),
        "podNames": pods,
        "boxes": drawing.boxes,
        "pods": drawing.pods,
        "orders": orders,
    }


def _links(fabric: Fabric, allocation: Allocation) -> tuple[dict[str, Hashable], tuple[str, ...]]:
    """For each allocated node what its GPUs hang on: rail, name of the leaf, numbers of the switch and of the pod."""
    places = find_places(fabric, allocation.nodes, allocation.tasks_per_node)
    port = places.port
    links: dict[str, Hashable] = {}
    for row, (name, count) in enumerate(zip(places.nodes, allocation.tasks_per_node, strict=True)):
        columns = (places.rail[row, :count], places.leaf[row, :count], port[row, :count], places.pod[row, :count])
        rows = zip(*(column.tolist() for column in columns), strict=True)
        links[name] = tuple(
            (rail, "" if leaf == NOWHERE else places.leaves[leaf], switch, pod) for rail, leaf, switch, pod in rows
        )
    return links, places.pods


def _order(name: str, placement: Placement, index: Mapping[str, int]) -> dict[str, Any]:
    numbers = [index[node] for node in placement.nodes]
    return {
        "name": name,
        "node": [numbers[node] for node in placement.node_of_rank.tolist()],
        "gpu": placement.gpu_of_rank.tolist(),
    }


@dataclass
class _Numbered:
    """Equal values get one number; None gets -1."""

    values: dict[Hashable, int] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)

    def add(self, value: Hashable | None) -> None:
        self.numbers.append(-1 if value is None else self.values.setdefault(value, len(self.values)))

"""A fabric as the text of our YAML file, a line a leaf, nodes as host lists."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from hpc_train.cluster.fabric import Fabric, FabricNode
from hpc_train.cluster.fabric_file import FILE_VERSION
from hpc_train.cluster.hostlist import compress_hostlist


def write_fabric_file(fabric: Fabric) -> str:
    """Write what read_fabric_file reads back to an equal fabric, but for its source's name.

    What most nodes have in common stands at the top, the others' own below `nodes`.
    """
    lines = [f"version: {FILE_VERSION}", f"source: {_flow(fabric.source)}"]
    if fabric.notes:
        lines += ["notes:", *(f"  - {_flow(note)}" for note in fabric.notes)]
    ratios = {"spine": fabric.spine_oversubscription, "core": fabric.core_oversubscription}
    lines.append(f"oversubscription: {_flow(ratios)}")
    if fabric.link_bytes_per_s:
        lines.append(f"link_bytes_per_s: {_flow(fabric.link_bytes_per_s)}")
    if fabric.rail_nics:
        lines.append(f"rail_nics: {_flow(list(fabric.rail_nics))}")
    common = _common(fabric.nodes.values())
    lines += [f"{name}: {_flow(value)}" for name, value in common.items()]
    lines += _pods(fabric)
    own = _own_details(fabric, common)
    if own:
        lines += ["nodes:", *(f"  {_flow(compress_hostlist(names))}: {detail}" for detail, names in own.items())]
    return "\n".join(lines) + "\n"


def _common(nodes: Iterable[FabricNode]) -> dict[str, Any]:
    """The number of GPUs and their rails that all nodes have; nothing where one does not say."""
    counts = Counter((node.num_gpus, node.rail_of_gpu) for node in nodes)
    (gpus, rails), _ = counts.most_common(1)[0] if counts else ((None, None), 0)
    # A value at the top holds for every node, and none can take it back.
    gpus = None if any(other is None for other, _ in counts) else gpus
    rails = None if any(other is None for _, other in counts) else rails
    found = {"num_gpus": gpus, "rail_of_gpu": None if rails is None else list(rails)}
    return {name: value for name, value in found.items() if value is not None}


def _pods(fabric: Fabric) -> list[str]:
    members: dict[str, dict[int | None, list[str]]] = {leaf: {} for leaf in fabric.pod_of_leaf}
    for node in fabric.nodes.values():
        for rail, leaf in enumerate(node.leaves):
            if leaf is not None:
                members[leaf].setdefault(None if node.is_leaf_set else rail, []).append(node.name)
    by_pod: dict[str, list[str]] = defaultdict(list)
    for leaf, pod in fabric.pod_of_leaf.items():
        by_pod[pod].append(leaf)
    lines = ["pods:"]
    for pod, leaves in by_pod.items():
        lines.append(f"  {_flow(pod)}:")
        if pod in fabric.core_of_pod:
            lines.append(f"    core: {_flow(fabric.core_of_pod[pod])}")
        if pod in fabric.pod_uplinks:
            lines.append(f"    uplinks: {fabric.pod_uplinks[pod]}")
        lines.append("    leaves:")
        lines += [f"      {_flow(leaf)}: {_leaf(fabric, leaf, members[leaf])}" for leaf in leaves]
    return lines


def _leaf(fabric: Fabric, leaf: str, members: Mapping[int | None, list[str]]) -> str:
    entries: list[dict[str, Any]] = []
    for rail, names in members.items():
        entries.append({"nodes": compress_hostlist(names), **({} if rail is None else {"rail": rail})})
    if leaf in fabric.leaf_uplinks:
        entries[0]["uplinks"] = fabric.leaf_uplinks[leaf]
    return _flow(entries[0] if len(entries) == 1 else entries)


def _own_details(fabric: Fabric, common: Mapping[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for node in fabric.nodes.values():
        detail: dict[str, Any] = {}
        if node.num_gpus is not None and node.num_gpus != common.get("num_gpus"):
            detail["num_gpus"] = node.num_gpus
        if node.rail_of_gpu is not None and list(node.rail_of_gpu) != common.get("rail_of_gpu"):
            detail["rail_of_gpu"] = list(node.rail_of_gpu)
        if node.nvlink_domain is not None:
            detail["nvlink_domain"] = node.nvlink_domain
        if node.down_rails:
            detail["down_rails"] = list(node.down_rails)
        if detail:
            found[_flow(detail)].append(node.name)
    return found


def _flow(value: Any) -> str:
    """JSON, which YAML reads as it is."""
    return json.dumps(value if not isinstance(value, Mapping) else dict(value))

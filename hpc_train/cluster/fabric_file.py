"""Our own YAML file of a fabric: read with line numbers in errors, and written by `hpc-train doctor --admin-dump`.

docs/reference/fabric-file.md describes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpc_train.cluster.fabric import TIERS, Fabric, FabricNode
from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.cluster.yaml_lines import Path, YamlFile, load_yaml_lines
from hpc_train.errors import LaunchError

FILE_VERSION = 1
# assumed: no node has more network cards; it keeps a slip of the finger from filling the memory.
MAX_RAILS = 64
# assumed: likewise, of GPUs.
MAX_GPUS = 1024
# assumed: no leaf and no pod has more links up.
_MAX_UPLINKS = 1_000_000
# assumed: a thousand times the fastest links that are built.
_MAX_LINK_BYTES_PER_S = 10**14
_TOP = (
    "version", "source", "notes", "oversubscription", "link_bytes_per_s", "rail_nics", "num_gpus", "rail_of_gpu",
    "pods", "nodes",
)  # fmt: skip
_POD = ("core", "uplinks", "leaves")
_LEAF = ("nodes", "rail", "uplinks")
_NODE = ("num_gpus", "rail_of_gpu", "nvlink_domain", "down_rails")


@dataclass
class _Draft:
    """What is known so far of the nodes; emptied into a Fabric at the end."""

    leaf_sets: dict[str, str] = field(default_factory=dict)
    rails: dict[str, dict[int, str]] = field(default_factory=dict)
    details: dict[str, tuple[Mapping[str, Any], Path]] = field(default_factory=dict)
    pod_of_leaf: dict[str, str] = field(default_factory=dict)
    core_of_pod: dict[str, str] = field(default_factory=dict)
    leaf_uplinks: dict[str, int] = field(default_factory=dict)
    pod_uplinks: dict[str, int] = field(default_factory=dict)
    # The leaves of all rails list the same nodes, mostly.
    expanded: dict[str, tuple[str, ...]] = field(default_factory=dict)


def read_fabric_file(text: str, source: str) -> Fabric:
    """Read a fabric from our YAML file.

    Raises:
        ConfigError: with the line, whatever is unknown, missing, given twice or in contradiction.
    """
    file = load_yaml_lines(text, source)
    top = _mapping(file, (), _TOP, required=("version", "pods"))
    if top["version"] != FILE_VERSION:
        raise file.refuse(("version",), f"this reader knows version {FILE_VERSION}, not {top['version']!r}")
    draft = _Draft()
    for pod in _mapping(file, ("pods",)):
        _read_pod(file, pod, draft)
    if not draft.leaf_sets and not draft.rails:
        raise file.refuse(("pods",), "no pod has a leaf with nodes; a fabric needs at least one node")
    for key in _mapping(file, ("nodes",)) if "nodes" in top else ():
        detail = _mapping(file, ("nodes", key), _NODE)
        for name in _hosts(file, ("nodes", key), key):
            if name not in draft.leaf_sets and name not in draft.rails:
                raise file.refuse(("nodes", key), f"the node {name} hangs on no leaf; add it to one under pods")
            if name in draft.details:
                raise file.refuse(("nodes", key), f"the node {name} is described twice")
            draft.details[name] = (detail, ("nodes", key))
    ratios = _ratios(file, top)
    speeds = _mapping(file, ("link_bytes_per_s",), TIERS) if "link_bytes_per_s" in top else {}
    rail_nics = tuple(str(name) for name in _list(file, ("rail_nics",), top.get("rail_nics", [])))
    nodes = _nodes(file, top, draft, len(rail_nics))
    return Fabric(
        nodes=nodes,
        pod_of_leaf=draft.pod_of_leaf,
        core_of_pod=draft.core_of_pod,
        source=source if "source" not in top else f"{source} ({top['source']})",
        spine_oversubscription=ratios["spine"],
        core_oversubscription=ratios["core"],
        leaf_uplinks=draft.leaf_uplinks,
        pod_uplinks=draft.pod_uplinks,
        link_bytes_per_s={
            tier: _number(file, ("link_bytes_per_s", tier), value, 1, most=_MAX_LINK_BYTES_PER_S)
            for tier, value in speeds.items()
        },
        are_rails_known=all(node.rail_of_gpu is not None for node in nodes.values()),
        rail_nics=rail_nics,
        notes=tuple(str(note) for note in _list(file, ("notes",), top.get("notes", []))),
    )


def _read_pod(file: YamlFile, pod: str, draft: _Draft) -> None:
    path: Path = ("pods", pod)
    entry = _mapping(file, path, _POD, required=("leaves",))
    if "core" in entry:
        draft.core_of_pod[pod] = str(entry["core"])
    if "uplinks" in entry:
        draft.pod_uplinks[pod] = _number(file, (*path, "uplinks"), entry["uplinks"], most=_MAX_UPLINKS)
    for leaf in _mapping(file, (*path, "leaves")):
        place = (*path, "leaves", leaf)
        if leaf in draft.pod_of_leaf:
            raise file.refuse(place, f"the leaf {leaf} is in pod {draft.pod_of_leaf[leaf]} already")
        draft.pod_of_leaf[leaf] = pod
        _read_leaf(file, place, leaf, draft)


def _read_leaf(file: YamlFile, place: Path, leaf: str, draft: _Draft) -> None:
    """A leaf is one entry, or a list of entries where its nodes reach it with different rails."""
    value = file.tree["pods"][place[1]]["leaves"][leaf]
    places = [(*place, index) for index in range(len(value))] if isinstance(value, list) else [place]
    for here in places:
        values = _mapping(file, here, _LEAF, required=("nodes",))
        if "uplinks" in values:
            if leaf in draft.leaf_uplinks:
                raise file.refuse((*here, "uplinks"), f"the uplinks of {leaf} are given already")
            draft.leaf_uplinks[leaf] = _number(file, (*here, "uplinks"), values["uplinks"], most=_MAX_UPLINKS)
        rail = _number(file, (*here, "rail"), values["rail"], most=MAX_RAILS - 1) if "rail" in values else None
        listed = values["nodes"]
        nodes = draft.expanded.get(listed) if isinstance(listed, str) else None
        if nodes is None:
            nodes = draft.expanded[listed] = _hosts(file, (*here, "nodes"), listed)
        _hang(file, here, nodes, leaf, rail, draft)


def _hang(file: YamlFile, place: Path, nodes: Iterable[str], leaf: str, rail: int | None, draft: _Draft) -> None:
    """Put nodes under a leaf; a node has one leaf for each rail, or one leaf set for all of them."""
    for name in nodes:
        rails = draft.rails.get(name)
        other = draft.leaf_sets.get(name)
        if other is None and rails:
            other = next(iter(rails.values())) if rail is None else rails.get(rail)
        if other is not None:
            which = "all its rails" if rail is None or name in draft.leaf_sets else f"rail {rail}"
            raise file.refuse(place, f"the node {name} hangs on the leaf {other} with {which} already")
        if rail is None:
            draft.leaf_sets[name] = leaf
        elif rails is None:
            draft.rails[name] = {rail: leaf}
        else:
            rails[rail] = leaf


def _nodes(file: YamlFile, top: Mapping[str, Any], draft: _Draft, num_nics: int) -> dict[str, FabricNode]:
    num_rails = max([num_nics, *(max(rails) + 1 for rails in draft.rails.values())])
    gpus = _number(file, ("num_gpus",), top["num_gpus"], 1, most=MAX_GPUS) if "num_gpus" in top else None
    common = (gpus, _rails_of_gpus(file, ("rail_of_gpu",), top.get("rail_of_gpu"), gpus))
    shared: dict[tuple[Any, ...], tuple[str | None, ...]] = {}
    found: dict[str, FabricNode] = {}
    for name, leaf in draft.leaf_sets.items():
        found[name] = _node(file, name, (leaf,), common, draft)
    for name, rails in draft.rails.items():
        key = tuple(sorted(rails.items()))
        leaves = shared.get(key)
        if leaves is None:
            leaves = shared[key] = tuple(rails.get(rail) for rail in range(num_rails))
        found[name] = _node(file, name, leaves, common, draft)
    return found


def _node(
    file: YamlFile,
    name: str,
    leaves: tuple[str | None, ...],
    common: tuple[int | None, tuple[int, ...] | None],
    draft: _Draft,
) -> FabricNode:
    gpus, rails = common
    detail, path = draft.details.get(name, ({}, ()))
    if "num_gpus" in detail:
        gpus = _number(file, (*path, "num_gpus"), detail["num_gpus"], 1, most=MAX_GPUS)
    if "rail_of_gpu" in detail:
        rails = _rails_of_gpus(file, (*path, "rail_of_gpu"), detail["rail_of_gpu"], gpus)
    if rails is not None and gpus is not None and len(rails) != gpus:
        raise file.refuse(path, f"the node {name} has {gpus} GPUs, but rail_of_gpu is given for {len(rails)}")
    if rails is not None and len(leaves) > 1 and max(rails) >= len(leaves):
        raise file.refuse(path, f"the node {name} has a GPU on rail {max(rails)}, but {len(leaves)} rails have leaves")
    down = tuple(
        _number(file, (*path, "down_rails"), rail, most=MAX_RAILS - 1)
        for rail in _list(file, (*path, "down_rails"), detail.get("down_rails", []))
    )
    known = len(leaves) if len(leaves) > 1 else max(rails) + 1 if rails is not None else gpus
    if known is not None and max(down, default=0) >= known:
        raise file.refuse((*path, "down_rails"), f"the node {name} has no rail {max(down)}, but rails 0 to {known - 1}")
    if len(leaves) > 1:
        leaves, down = tuple(None if rail in down else leaf for rail, leaf in enumerate(leaves)), ()
    domain = detail.get("nvlink_domain")
    return FabricNode(name, leaves, gpus, rails, None if domain is None else str(domain), down)


def _rails_of_gpus(file: YamlFile, path: Path, value: Any, gpus: int | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    rails = tuple(_number(file, path, rail, most=MAX_RAILS - 1) for rail in _list(file, path, value))
    if not rails or (gpus is not None and len(rails) != gpus):
        raise file.refuse(path, f"{len(rails)} rails are given for {gpus or 'no'} GPUs; give one for each GPU")
    return rails


def _ratios(file: YamlFile, top: Mapping[str, Any]) -> dict[str, float]:
    given = _mapping(file, ("oversubscription",), ("spine", "core")) if "oversubscription" in top else {}
    for tier, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 1000:
            raise file.refuse(("oversubscription", tier), f"{value!r} is not a ratio from 1 to 1000; 4 means 4:1")
    return {tier: float(given.get(tier, 1.0)) for tier in ("spine", "core")}


def _mapping(
    file: YamlFile, path: Path, known: tuple[str, ...] | None = None, required: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    value = file.tree
    for part in path:
        value = value[part]
    if not isinstance(value, dict):
        raise file.refuse(path, f"expected names with values below them, found {_kind(value)}")
    for key in value if known is not None else ():
        if key not in (known or ()):
            raise file.refuse((*path, key), f"unknown key; known here: {', '.join(known or ())}")
    for key in required:
        if key not in value:
            raise file.refuse(path, f"{key} is missing")
    return value


def _list(file: YamlFile, path: Path, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise file.refuse(path, f"expected a list, found {_kind(value)}")
    return value


def _number(file: YamlFile, path: Path, value: Any, least: int = 0, *, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise file.refuse(path, f"{value!r} is not a whole number from {least} to {most}")
    return value


def _hosts(file: YamlFile, path: Path, value: Any) -> tuple[str, ...]:
    if not isinstance(value, str):
        raise file.refuse(path, f"expected a host list in quotes, found {_kind(value)}")
    try:
        hosts = expand_hostlist(value)
    except LaunchError as error:
        raise file.refuse(path, str(error)) from None
    twice = [name for name, count in Counter(hosts).items() if count > 1]
    if twice:
        raise file.refuse(path, f"{twice[0]} is listed twice")
    return hosts


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"[:60]

"""Slurm's topology.yaml (25.05 and later): several named topologies, each a tree, blocks, or flat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_train.cluster.fabric import Fabric
from hpc_train.cluster.fabric_block import Block, fabric_of_blocks
from hpc_train.cluster.fabric_tree import Switch, fabric_of_tree
from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.cluster.yaml_lines import Path, YamlFile, load_yaml_lines
from hpc_train.errors import ConfigError, LaunchError

_KINDS = ("tree", "block", "flat", "torus3d", "ring")


def read_topology_yaml(text: str, source: str, name: str | None = None) -> Fabric | None:
    """Read one of its topologies: the named one, else the cluster's default, else the only one.

    Returns:
        None where that topology is flat: it tells nothing about switches.

    Raises:
        ConfigError: with the line, what is malformed; or which of several topologies is meant is not clear.
    """
    file = load_yaml_lines(text, source)
    if not isinstance(file.tree, list) or not file.tree:
        raise file.refuse((), "expected a list of topologies, each with `topology: NAME`")
    names: dict[str, int] = {}
    default: int | None = None
    for index, _ in enumerate(file.tree):
        entry = _entry(file, (index,), ("topology", "cluster_default", *_KINDS), ("topology",))
        its_name = _name(file, (index, "topology"))
        if its_name in names:
            raise file.refuse((index,), f"the topology {its_name} is described twice")
        names[its_name] = index
        if entry.get("cluster_default") is True and default is None:
            default = index
    chosen = names.get(name) if name is not None else default if default is not None else _only(names)
    if chosen is None:
        what = f"there is no topology {name}" if name is not None else "none of its topologies is the cluster's default"
        raise ConfigError(f"{source}: {what}; it has {', '.join(names)}. Name one: {source}#NAME")
    return _one(file, chosen, f"{source}#{next(key for key, index in names.items() if index == chosen)}")


def _only(names: Mapping[str, int]) -> int | None:
    return 0 if len(names) == 1 else None


def _one(file: YamlFile, index: int, source: str) -> Fabric | None:
    entry = file.tree[index]
    kinds = [kind for kind in _KINDS if entry.get(kind)]
    if len(kinds) != 1:
        raise file.refuse((index,), f"a topology is one of tree, block and flat; found {', '.join(kinds) or 'none'}")
    if kinds[0] == "flat":
        return None
    if kinds[0] == "tree":
        return fabric_of_tree(_switches(file, (index, "tree")), source)
    if kinds[0] == "block":
        return _blocks(file, (index, "block"), source)
    raise file.refuse((index, kinds[0]), f"a topology of the kind {kinds[0]} cannot be used; only tree, block and flat")


def _switches(file: YamlFile, path: Path) -> list[Switch]:
    _entry(file, path, ("switches",), ("switches",))
    found = []
    for index, _ in enumerate(_list(file, (*path, "switches"))):
        place = (*path, "switches", index)
        entry = _entry(file, place, ("switch", "children", "nodes"), ("switch",))
        children, nodes = (_hosts(file, (*place, key)) if key in entry else () for key in ("children", "nodes"))
        found.append(Switch(_name(file, (*place, "switch")), nodes, children, file.lines[place]))
    return found


def _blocks(file: YamlFile, path: Path, source: str) -> Fabric:
    top = _entry(file, path, ("block_sizes", "blocks"), ("block_sizes", "blocks"))
    sizes = _list(file, (*path, "block_sizes"))
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise file.refuse((*path, "block_sizes"), f"{top['block_sizes']} is not a list of whole numbers")
    found = []
    for index, _ in enumerate(_list(file, (*path, "blocks"))):
        place = (*path, "blocks", index)
        entry = _entry(file, place, ("block", "nodes"), ("block",))
        nodes = _hosts(file, (*place, "nodes")) if "nodes" in entry else ()
        found.append(Block(_name(file, (*place, "block")), nodes, file.lines[place]))
    return fabric_of_blocks(found, sizes, source, file.lines[(*path, "block_sizes")])


def _at(file: YamlFile, path: Path) -> Any:
    value = file.tree
    for part in path:
        value = value[part]
    return value


def _entry(file: YamlFile, path: Path, known: tuple[str, ...], required: tuple[str, ...]) -> dict[str, Any]:
    value = _at(file, path)
    if not isinstance(value, dict):
        raise file.refuse(path, f"expected {' and '.join(required)} with a value, found {value!r}"[:120])
    for key in value:
        if key not in known:
            raise file.refuse((*path, key), f"unknown key; known here: {', '.join(known)}")
    for key in required:
        if key not in value:
            raise file.refuse(path, f"{key} is missing")
    return value


def _list(file: YamlFile, path: Path) -> list[Any]:
    value = _at(file, path)
    if not isinstance(value, list):
        raise file.refuse(path, f"expected a list, found {value!r}"[:120])
    return value


def _name(file: YamlFile, path: Path) -> str:
    """A text, or a number that is written as anyone would; `yes`, 001 and the like are something else to YAML."""
    value = _at(file, path)
    if type(value) is int and file.written[path] == str(value):
        return str(value)
    if not isinstance(value, str) or not value:
        found = f"{type(value).__name__} {value!r}"[:60] if value not in (None, "") else "nothing"
        raise file.refuse(
            path, f"expected a name or a host list, in quotes where YAML has another meaning, found {found}"
        )
    return value


def _hosts(file: YamlFile, path: Path) -> tuple[str, ...]:
    try:
        return expand_hostlist(_name(file, path))
    except LaunchError as error:
        raise file.refuse(path, str(error)) from None

"""SLURM_TOPOLOGY_ADDR of every node of a job, put together: each tells the switches above one node."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpc_train.cluster.fabric import Fabric
from hpc_train.cluster.fabric_block import Block, fabric_of_blocks
from hpc_train.cluster.fabric_tree import Switch, fabric_of_tree
from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.errors import ConfigError, LaunchError

SOURCE = "SLURM_TOPOLOGY_ADDR"


def fabric_from_addresses(addresses: Mapping[str, tuple[str, str]]) -> Fabric | None:
    """Put the nodes' addresses together.

    Args:
        addresses: by node, SLURM_TOPOLOGY_ADDR and SLURM_TOPOLOGY_ADDR_PATTERN as that node has them.

    Returns:
        None where Slurm has no topology: the variable is not set, or its pattern is `node`.

    Raises:
        ConfigError: an address does not fit its pattern or its node, or two contradict each other.
    """
    ways = {node: split_address(address, pattern, node) for node, (address, pattern) in addresses.items()}
    if not any(ways.values()):
        return None
    bare = [node for node, way in ways.items() if not way]
    if bare:
        raise ConfigError(f"{SOURCE}: {bare[0]} has no switch above it, others of the job have")
    kinds = {pattern.split(".")[0] for _, pattern in addresses.values()}
    if kinds == {"block"}:
        members: dict[str, list[str]] = {}
        for node, way in ways.items():
            members.setdefault(way[0][0], []).append(node)
        return fabric_of_blocks([Block(name, tuple(nodes), 0) for name, nodes in members.items()], None, SOURCE)
    return _tree(ways)


def split_address(address: str, pattern: str, node: str | None = None) -> tuple[tuple[str, ...], ...]:
    """The switches above a node from the top down, at each level all that lead to it; empty without a topology.

    The node is what is left after one part for each further word of the pattern, since its name may hold dots.

    Raises:
        ConfigError: the address does not fit the pattern, or names another node.
    """
    words = pattern.split(".") if pattern else []
    if not address or words in ([], ["node"]):
        return ()
    if words[-1] != "node" or set(words[:-1]) not in ({"switch"}, {"block"}):
        raise ConfigError(f"{SOURCE}_PATTERN={pattern} is not known; expected switch.node, block.node and the like")
    # Dots and commas may stand in brackets.
    parts = re.split(r"\.(?![^\[\]]*\])", address)
    count = len(words) - 1
    rest = ".".join(parts[count:])
    if len(parts) <= count or not rest or (node is not None and rest != node):
        raise ConfigError(
            f"{SOURCE}={address} does not fit its pattern {pattern}"
            + ("" if node is None else f" on the node {node}: behind {count} parts the node's name is expected")
        )
    try:
        levels = [expand_hostlist(part) if part else () for part in parts[:count]]
    except LaunchError as error:
        raise ConfigError(f"{SOURCE}={address}: {error}") from None
    # A level at which no switch leads to the node is left out.
    return tuple(level for level in levels if level)


def _tree(ways: Mapping[str, tuple[tuple[str, ...], ...]]) -> Fabric:
    """The tree that these ways are part of.

    Two leaves at once are one leaf set, if no node has only one of them.
    """
    leaf_of: dict[str, str] = {}
    nodes: dict[str, list[str]] = {}
    children: dict[str, dict[str, None]] = {}
    for node, way in ways.items():
        leaf = ",".join(way[-1])
        for switch in way[-1]:
            if leaf_of.setdefault(switch, leaf) != leaf:
                raise ConfigError(
                    f"{SOURCE}: {node} hangs on {leaf}, another node on {leaf_of[switch]}: which leaf of one rail it "
                    "hangs on is not known"
                )
        nodes.setdefault(leaf, []).append(node)
        below: tuple[str, ...] = (leaf,)
        for level in reversed(way[:-1]):
            for switch in level:
                children.setdefault(switch, {}).update(dict.fromkeys(below))
            below = level
    switches = [Switch(name, tuple(members), (), 0) for name, members in nodes.items()]
    switches += [Switch(name, (), tuple(below), 0) for name, below in children.items()]
    return fabric_of_tree(switches, SOURCE)

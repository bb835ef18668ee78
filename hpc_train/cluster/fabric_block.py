"""Slurm's topology/block as a Fabric: blocks of nodes, and groups of neighbouring blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.cluster.fabric import Fabric, FabricNode
from hpc_train.errors import ConfigError


@dataclass(frozen=True)
class Block:
    """A block as a source describes it. line: where."""

    name: str
    nodes: tuple[str, ...]
    line: int


def fabric_of_blocks(blocks: Sequence[Block], sizes: Sequence[int] | None, source: str, sizes_line: int = 0) -> Fabric:
    """Take each block as a leaf set.

    BlockSizes counts nodes: the first is that of a block, the next those of groups of neighbouring blocks, in the
    order in which they are described. The second size makes the pods; without one, all blocks meet in one pod.
    sizes_line: where they stand, 0 if nowhere.

    Raises:
        ConfigError: a block is described twice, a node is in two, or the sizes are not powers of two of the first.
    """
    sizes = list(sizes or ())
    where = f"{source}, line {sizes_line}" if sizes_line else source
    for size in sizes[1:]:
        factor, rest = divmod(size, sizes[0])
        if rest or factor & (factor - 1) or size <= sizes[0]:
            raise ConfigError(f"{where}: of BlockSizes={sizes}, {size} is not {sizes[0]} times a power of two")
    blocks_of_pod = sizes[1] // sizes[0] if len(sizes) > 1 else len(blocks)
    nodes: dict[str, FabricNode] = {}
    line_of: dict[str, int] = {}
    pod_of_leaf: dict[str, str] = {}
    for index, block in enumerate(blocks):
        if block.name in pod_of_leaf:
            raise ConfigError(f"{source}, line {block.line}: the block {block.name} is described twice")
        pod_of_leaf[block.name] = f"blocks {index // blocks_of_pod}"
        for name in block.nodes:
            if name in nodes:
                other = nodes[name].leaves[0]
                raise ConfigError(
                    f"{source}, line {block.line}: the node {name} is in {block.name} and, on line {line_of[name]}, in "
                    f"{other}: which block it belongs to is not known"
                )
            nodes[name], line_of[name] = FabricNode(name, (block.name,)), block.line
    if not nodes:
        raise ConfigError(f"{source}: no block has nodes")
    pods = dict.fromkeys(pod_of_leaf.values())
    core = dict.fromkeys(pods, "core") if len(pods) > 1 else {}
    note = f"{source} has blocks, not switches: a block is counted as one leaf, " + (
        "groups of blocks as pods" if core else "and all blocks as one pod"
    )
    return Fabric(nodes, pod_of_leaf, core, source, notes=(note,))

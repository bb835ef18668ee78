"""Which rank runs on which GPU of which node."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from hpc_train.cluster.allocation import Allocation
from hpc_train.errors import ConfigError
from hpc_train.plan.mesh import Mesh

SLURM_ORDER = "slurm"
AUTO_ORDER = "auto"


@dataclass(frozen=True)
class Placement:
    """A place for each rank.

    nodes: those that hold ranks, in the order of their first rank. node_of_rank: index into nodes. gpu_of_rank: slot
    on the node. order: "auto", "slurm", or axes from the innermost to the outermost. notes: for the user.
    """

    mesh: Mesh
    nodes: tuple[str, ...]
    node_of_rank: np.ndarray
    gpu_of_rank: np.ndarray
    order: str
    notes: tuple[str, ...] = ()


def slurm_placement(mesh: Mesh, allocation: Allocation, exclude: Collection[str] = ()) -> Placement:
    """Number the ranks node by node, in the allocation's order.

    Raises:
        ConfigError: the nodes that are not excluded have fewer slots than the mesh has ranks.
    """
    kept = [index for index, node in enumerate(allocation.nodes) if node not in exclude]
    counts = np.array([allocation.tasks_per_node[index] for index in kept], dtype=np.int64)
    if counts.sum() < mesh.world_size:
        raise ConfigError(
            f"a mesh of {mesh.describe()} needs {mesh.world_size} ranks, but {len(kept)} nodes of the allocation have "
            f"{counts.sum()}{f', {len(allocation.nodes) - len(kept)} being excluded' if exclude else ''}"
        )
    node = np.repeat(np.array(kept, dtype=np.int64), counts)[: mesh.world_size]
    slot = np.concatenate([np.arange(count) for count in counts])[: mesh.world_size]
    return make_placement(mesh, allocation.nodes, node, slot, SLURM_ORDER)


def make_placement(
    mesh: Mesh, nodes: tuple[str, ...], node: np.ndarray, slot: np.ndarray, order: str, notes: tuple[str, ...] = ()
) -> Placement:
    """A placement from an index into `nodes` and a slot for each rank; nodes without ranks are dropped."""
    used, first = np.unique(node, return_index=True)
    by_first_rank = used[np.argsort(first)]
    index = np.zeros(len(nodes), np.int32)
    index[by_first_rank] = np.arange(len(by_first_rank))
    return Placement(mesh, tuple(nodes[at] for at in by_first_rank), index[node], slot.astype(np.int32), order, notes)

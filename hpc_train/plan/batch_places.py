"""Rings along the placement: in which order hdp ranks are near each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpc_train.cluster.fabric import Fabric
from hpc_train.plan.batch_cost import Integers
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.placement import Placement
from hpc_train.plan.places import find_places


def hdp_places(placement: Placement, fabric: Fabric) -> tuple[Integers, Integers, Integers]:
    """Order, host and port of the hdp ranks, for `HdpRanks.make`.

    The order goes through pods, leaves, hosts and GPUs. It is that of the first stage and the first tp rank: the others
    are laid out alike, and a ring has one order in all of them.

    Raises:
        ConfigError: the fabric has not one of the nodes.
    """
    ranks = _hdp_ranks(placement.mesh)[0, :, 0]
    num_gpus = np.zeros(len(placement.nodes), np.int64)
    np.maximum.at(num_gpus, placement.node_of_rank, placement.gpu_of_rank + 1)
    places = find_places(fabric, placement.nodes, num_gpus.tolist())
    node, gpu = placement.node_of_rank[ranks], placement.gpu_of_rank[ranks]
    host = places.domain[node].astype(np.int64)
    # Nodes of one leaf set have one leaf for each rail; that of the first rail stands for all.
    group, pod = places.leaf[node, 0], places.pod[node, 0]
    order = np.lexsort((gpu, node, host, group, pod))
    return order.astype(np.int64), host, places.port[node, gpu].astype(np.int64)


def hdp_figures(placement: Placement, fabric: Fabric | None) -> dict[str, Any]:
    """What plan.json says of the hdp ranks, so that all ranks and agents plan with the same.

    order, host, port: as `hdp_places`; where no topology is known, nodes are hosts and ranks go in their order.
    link_bytes_per_s: of a rank's card; None where that is not known.
    """
    if fabric is None:
        ranks = _hdp_ranks(placement.mesh)[0, :, 0]
        order, host = np.arange(len(ranks)), placement.node_of_rank[ranks].astype(np.int64)
        places, card = (order, host, host), None
    else:
        places, card = hdp_places(placement, fabric), fabric.link_bytes_per_s.get("leaf")
    names = ("order", "host", "port")
    return {
        **{name: array.tolist() for name, array in zip(names, places, strict=True)},
        "nodes": list(hdp_nodes(placement)),
        "link_bytes_per_s": card,
    }


def hdp_nodes(placement: Placement) -> tuple[str, ...]:
    """The node of each hdp rank, on its first stage and first tp rank."""
    ranks = _hdp_ranks(placement.mesh)[0, :, 0]
    return tuple(placement.nodes[node] for node in placement.node_of_rank[ranks].tolist())


def _hdp_ranks(mesh: Mesh) -> Integers:
    """World ranks by stage, hdp rank and tp rank."""
    return np.arange(mesh.world_size, dtype=np.int64).reshape(mesh.pp, mesh.dp * mesh.cp, mesh.tp)

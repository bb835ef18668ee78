"""What rings of a batch plan send, and over which switches."""

from __future__ import annotations

import numpy as np

from hpc_train.cluster.fabric import Fabric
from hpc_train.plan.batch_cost import Integers
from hpc_train.plan.batch_table import BatchTable
from hpc_train.plan.placement import Placement
from hpc_train.plan.traffic import Transfers, route_transfers


def ring_bytes_by_tier(table: BatchTable, placement: Placement, fabric: Fabric, bytes_per_token: int) -> dict[str, int]:
    """Bytes that the rings' members of all stages and tp ranks send in one pass, by the tier that they climb to.

    bytes_per_token: keys and values of one token on one tp rank, all layers of a stage.

    Raises:
        ConfigError: the fabric has not one of the nodes, or a node that must send has no link that works.
    """
    sender, receiver, tokens = ring_edges(table)
    mesh = placement.mesh
    by_hdp = np.arange(mesh.world_size, dtype=np.int64).reshape(mesh.pp, mesh.dp * mesh.cp, mesh.tp)

    def on_all(hdp_ranks: Integers) -> Integers:
        return np.asarray(by_hdp[:, hdp_ranks, :].ravel(), np.int64)

    num_bytes = np.broadcast_to((tokens * bytes_per_token)[None, :, None], by_hdp[:, sender, :].shape).ravel()
    listed = Transfers(on_all(sender), on_all(receiver), num_bytes)
    return route_transfers(placement, fabric, listed).bytes_by_tier()


def ring_edges(table: BatchTable) -> tuple[Integers, Integers, Integers]:
    """Sender, receiver, and the tokens that go from one to the other in one pass, of each neighbour of each ring."""
    sizes = np.repeat(table.sizes, table.sizes)
    first = np.repeat(table.first_rank[:-1], table.sizes)
    place = np.arange(len(table.ranks)) - first
    tokens = np.repeat(table.pack_sums()[1], table.sizes) * (sizes - 1) // sizes
    is_ring = sizes > 1
    receiver = table.ranks[first + (place + 1) % sizes]
    return table.ranks[is_ring], receiver[is_ring], tokens[is_ring]

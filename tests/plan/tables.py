"""Tables of boxes and places of ranks, for tests and benches of the plans of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpc_train.plan.box_table import BoxTable
from hpc_train.plan.checkpoint_readers import Places
from hpc_train.plan.flat import Box
from hpc_train.plan.mesh import Mesh


def table_of(rows: Sequence[tuple[int, Box]], max_dims: int) -> BoxTable:
    """From (tensor, box) pairs. max_dims: of any tensor."""
    filled = np.empty((len(rows), 2 + 2 * max_dims), dtype=np.int64)
    zeros, ones = (0,) * max_dims, (1,) * max_dims
    for row, (tensor, box) in enumerate(rows):
        count = len(box.sizes)
        filled[row] = (tensor, count, *box.offsets, *zeros[count:], *box.sizes, *ones[count:])
    return BoxTable(filled[:, 0], filled[:, 2 : 2 + max_dims], filled[:, 2 + max_dims :], filled[:, 1])


def places_of(mesh: Mesh, gpus_per_node: int) -> Places:
    """Ranks node by node, a rail for each of its GPUs."""
    ranks = np.arange(mesh.world_size)
    return Places(ranks // gpus_per_node, ranks % gpus_per_node)

"""When each micro-batch of a batch plan runs on its ranks, by the costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from hpc_train.plan.batch_cost import BatchCosts, Integers
from hpc_train.plan.batch_problem import HdpRanks
from hpc_train.plan.batch_table import BatchTable


@final
@dataclass(frozen=True, eq=False)
class PackSpans:
    """Begin and end of each pack of a table, in ticks of one layer; the same for all ranks of its ring."""

    begins: Integers
    ends: Integers


def pack_spans(table: BatchTable, ranks: HdpRanks, costs: BatchCosts) -> PackSpans:
    """Play a plan as `batch_times.model_times` does, and keep each pack's time."""
    from hpc_train.plan.batch_kernels import at_speed

    squares, tokens = table.pack_sums()
    ticks = np.asarray(costs.micro_batch(squares, tokens, table.sizes), np.int64).reshape(-1)
    free = np.zeros(table.num_ranks, np.int64)
    begins, ends = np.zeros(table.num_packs, np.int64), np.zeros(table.num_packs, np.int64)
    for pack in range(table.num_packs):
        members = table.ranks[table.first_rank[pack] : table.first_rank[pack + 1]]
        begins[pack] = free[members].max()
        ends[pack] = begins[pack] + at_speed(ticks[pack], ranks.speed_milli[members].min())
        free[members] = ends[pack]
    return PackSpans(begins, ends)

"""The baseline: context parallel of one fixed degree for every sequence, however short."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import numpy as np

from hpc_train.errors import ConfigError
from hpc_train.plan.batch_cost import MILLI
from hpc_train.plan.batch_naive import best_fit
from hpc_train.plan.batch_problem import BatchPlanner, BatchProblem, concatenated
from hpc_train.plan.batch_table import BatchTable


@final
@dataclass(frozen=True, slots=True)
class StaticPlanner(BatchPlanner):
    """Rows of `context` tokens, each on the next `cp` ranks in turn, all of its sequences on all of them.

    cp: 0 for the fewest ranks that hold a row and divide the axis. Each sequence takes whole multiples of 2 * cp tokens
    of a row, since its parts are padded to equal ones. All ranks are taken for the smallest of them.
    """

    context: int
    cp: int = 0

    def plan(self, problem: BatchProblem) -> BatchTable:
        num_ranks = len(problem.ranks)
        capacity = problem.capacities[-1]
        cp = self.cp or smallest_cp(self.context, capacity, num_ranks)
        if num_ranks % cp:
            raise ConfigError(f"cp={cp} does not divide the {num_ranks} ranks of the hdp axis")
        unit = 1 if cp == 1 else 2 * cp
        padded = -(-problem.lengths // unit) * unit
        room = min(-(-self.context // unit) * unit, capacity * cp // unit * unit)
        if padded.size and int(padded.max()) > room:
            raise ConfigError(
                f"a sequence of {int(problem.lengths.max())} tokens is longer than a row of context={self.context}, "
                f"and cp={cp} ranks of {capacity} tokens hold {capacity * cp // unit * unit}. Use a larger context and "
                "cp, or cut documents at the context"
            )
        rows = best_fit(padded.tolist(), room)
        first_sequence, sequences = concatenated(rows)
        number = np.arange(len(rows))
        num_groups = num_ranks // cp
        ranks = problem.ranks.order.reshape(num_groups, cp)[number % num_groups]
        counts = np.zeros(num_ranks, np.int64)
        np.add.at(counts, ranks.ravel(), 1)
        return BatchTable(
            problem.step, problem.lengths, first_sequence, sequences, np.arange(len(rows) + 1) * cp, ranks.ravel(),
            np.repeat(number // num_groups, cp), np.zeros(len(rows), np.int64), np.maximum(counts, 1),
        )  # fmt: skip


def least_static_ticks(problem: BatchProblem, context: int) -> int:
    """A time that no plan of rings of one size beats: as if rows could be shared by all rings in any way.

    Raises:
        ConfigError: all ranks together do not hold a row.
    """
    num_ranks, costs = len(problem.ranks), problem.costs
    cp = smallest_cp(context, problem.capacities[-1], num_ranks)
    squares, tokens = int((problem.lengths**2).sum()), int(problem.lengths.sum())
    without_latency = replace(costs, ring_per_step=0, per_micro_batch=0)
    whole = without_latency.micro_batch(squares, tokens, cp)
    return int(whole) * cp // num_ranks * MILLI // int(problem.ranks.speed_milli.max())


def smallest_cp(context: int, capacity: int, num_ranks: int) -> int:
    """The fewest ranks that hold a row of `context` tokens and divide the axis.

    Raises:
        ConfigError: all ranks together do not hold it.
    """
    for cp in range(1, num_ranks + 1):
        held = capacity if cp == 1 else 2 * cp * (capacity // 2)
        if num_ranks % cp == 0 and held >= context:
            return cp
    raise ConfigError(
        f"context={context} does not fit on all {num_ranks} ranks of {capacity} tokens, which hold "
        f"{2 * num_ranks * (capacity // 2)}. Use a shorter context, or {-(-context // capacity)} ranks"
    )

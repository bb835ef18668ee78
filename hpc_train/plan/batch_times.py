"""How long a batch plan takes by the costs, and what its rings send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from hpc_train.plan.batch_cost import BatchCosts, Integers
from hpc_train.plan.batch_problem import HdpRanks
from hpc_train.plan.batch_table import BatchTable


@final
@dataclass(frozen=True, eq=False)
class BatchTimes:
    """By rank, in ticks of one layer: when it is done, and how long it computes; the rest is waiting for rings.

    longest: ticks of the longest micro-batch at the profile's speed.
    """

    ends: Integers
    busy: Integers
    longest: int

    @property
    def makespan(self) -> int:
        return int(self.ends.max())

    @property
    def imbalance(self) -> float:
        """The longest time over the mean computing time: 1.0 where nobody ever waits."""
        return self.makespan / max(1.0, float(self.busy.mean()))


def model_times(table: BatchTable, ranks: HdpRanks, costs: BatchCosts) -> BatchTimes:
    """Play a plan where a ring waits for all its ranks and ranks do not meet otherwise before the step's end.

    This is a step without pipelines. With them, ranks are pipelines whose stages add their own idle time.
    """
    from hpc_train.plan.batch_kernels import play_packs

    squares, tokens = table.pack_sums()
    ticks = np.asarray(costs.micro_batch(squares, tokens, table.sizes), np.int64).reshape(-1)
    ends, busy = play_packs(table.first_rank, table.ranks, ticks, ranks.speed_milli)
    return BatchTimes(ends, busy, int(ticks.max(initial=0)))


@final
@dataclass(frozen=True, slots=True)
class PassedBytes:
    """What goes round a ring of a token. key_value: of all times; on each, no member gets its own back, so a ring of N
    passes them on N - 1 times. gradient: of these, which go home: N times.
    """

    key_value: int
    gradient: int

    @property
    def once_round(self) -> int:
        """In N hops."""
        return self.key_value + self.gradient

    def times(self, number: int) -> PassedBytes:
        """Of so many layers."""
        return PassedBytes(self.key_value * number, self.gradient * number)


def ring_bytes(table: BatchTable, passed: PassedBytes) -> int:
    """What all ranks together send in their rings."""
    kept = table.pack_sums()[1][table.sizes > 1]
    return ring_tokens(table) * passed.once_round + int(kept.sum()) * passed.gradient


def ring_tokens(table: BatchTable) -> int:
    """Tokens whose keys and values are sent in one pass of one layer, summed over all ranks."""
    return int((table.pack_sums()[1] * (table.sizes - 1)).sum())

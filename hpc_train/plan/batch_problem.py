"""What a batch planner is given: a step's lengths, the ranks with what each can hold and do, and the costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from hpc_train.errors import ConfigError
from hpc_train.plan.batch_cost import MILLI, BatchCosts, Integers, smallest_rings
from hpc_train.plan.batch_table import BatchTable

BLOCK_TOKENS = 128
"""Tokens of one block of attention (assumed: the tile of the usual GPU kernels); less is not worth a rank."""
SPEED_STEP_MILLI = 10
"""Speeds are rounded to this, so that noise in what was measured does not make every rank one of its kind (assumed)."""
MAX_BITS = 62


@final
@dataclass(frozen=True, eq=False)
class HdpRanks:
    """The ranks of the hdp axis, all arrays by rank.

    capacity_tokens: what a micro-batch may have at most. speed_milli: 1000 is the profile's speed; a rank of 500 takes
    twice as long. order: the ranks in an order in which neighbours are near each other. host, port: by rank; ranks of
    one host reach each other without a switch, ranks of one port meet in the first one.
    """

    capacity_tokens: Integers
    speed_milli: Integers
    order: Integers
    host: Integers
    port: Integers

    def __len__(self) -> int:
        return len(self.capacity_tokens)

    @staticmethod
    def alike(num_ranks: int, capacity_tokens: int) -> HdpRanks:
        """Ranks of one kind, whose places are not known."""
        return HdpRanks.make(np.full(num_ranks, capacity_tokens))

    @staticmethod
    def make(capacity_tokens: Any, speeds: Any = None, places: tuple[Any, Any, Any] | None = None) -> HdpRanks:
        """Ranks from lists.

        Args:
            speeds: Relative ones, 1.0 being the profile's. None: all alike.
            places: order, host and port, as `batch_places.hdp_places` finds them. None: not known.

        Raises:
            ConfigError: no rank, lists of unequal length, a speed that is none, an order that is none.
        """
        capacity = np.array(capacity_tokens, np.int64)
        given = np.array(np.ones(len(capacity)) if speeds is None else speeds, np.float64)
        number = np.arange(len(capacity))
        order, host, port = (np.array(found, np.int64) for found in (places or (number, number, number)))
        if not len(capacity) or {len(capacity)} != {len(given), len(order), len(host), len(port)}:
            raise ConfigError("an hdp axis needs at least one rank, and one capacity, speed and place for each")
        if not (np.isfinite(given) & (given >= SPEED_STEP_MILLI / MILLI) & (given <= MILLI)).all():
            worst = int(np.flatnonzero(~((given >= SPEED_STEP_MILLI / MILLI) & (given <= MILLI)))[0])
            raise ConfigError(f"the speed of hdp rank {worst} is {given[worst]}; it must be between 0.01 and 1000")
        if not np.array_equal(np.sort(order), number):
            raise ConfigError("the order of the hdp ranks does not name each of them once")
        speed = np.round(given * (MILLI / SPEED_STEP_MILLI)).astype(np.int64) * SPEED_STEP_MILLI
        return HdpRanks(capacity, speed, order, host, port)


@final
@dataclass(frozen=True, eq=False)
class BatchProblem:
    """One step's batch to be planned.

    lengths: tokens of each of its sequences, 0 for one that has none. block_tokens: of one block of attention; rings do
    not grow until their ranks have less.
    """

    step: int
    lengths: Integers
    ranks: HdpRanks
    costs: BatchCosts
    block_tokens: int

    @staticmethod
    def make(
        step: int, lengths: Any, ranks: HdpRanks, costs: BatchCosts, *, block_tokens: int = BLOCK_TOKENS
    ) -> BatchProblem:
        """Check what can be checked before planning.

        Raises:
            ConfigError: a length below 0, a capacity below one block of attention, a sequence that all ranks together
                cannot hold, or costs so large that their sums leave 64 bits.
        """
        found = np.asarray(lengths, np.int64).reshape(-1)
        if found.size and int(found.min()) < 0:
            raise ConfigError(f"sequence {int(found.argmin())} of step {step} has {int(found.min())} tokens")
        smallest, block_tokens = int(ranks.capacity_tokens.min()), max(2, block_tokens)
        if smallest < block_tokens:
            rank = int(ranks.capacity_tokens.argmin())
            raise ConfigError(
                f"hdp rank {rank} holds {smallest} tokens in a micro-batch, less than one block of attention "
                f"({block_tokens} tokens). Give it more memory: a larger tp, fewer layers a stage, recomputation"
            )
        problem = BatchProblem(step, found, ranks, costs, block_tokens)
        problem._check_fits()
        problem._check_sums()
        return problem

    @cached_property
    def capacities(self) -> tuple[int, ...]:
        """The different capacities, the largest first."""
        return tuple(int(found) for found in np.unique(self.ranks.capacity_tokens)[::-1])

    def ranks_that_hold(self, capacity: int) -> int:
        """How many ranks have at least this capacity."""
        return int((self.ranks.capacity_tokens >= capacity).sum())

    @cached_property
    def smallest_sizes(self) -> Integers:
        """The fewest ranks that hold each sequence."""
        found = np.full(len(self.lengths), len(self.ranks) + 1, np.int64)
        for capacity in self.capacities:
            sizes = smallest_rings(self.lengths, capacity, self.costs, self.ranks_that_hold(capacity))
            found = np.where(sizes > 0, np.minimum(found, sizes), found)
        return found

    def _check_fits(self) -> None:
        too_long = np.flatnonzero(self.smallest_sizes > len(self.ranks))
        if not too_long.size:
            return
        worst = int(too_long[self.lengths[too_long].argmax()])
        length, count = int(self.lengths[worst]), len(self.ranks)
        most = self._longest_that_fits()
        ratio = "activations may be offloaded as far as copies hide" if self.costs.offload else "offload ratio 0"
        needed = -(-length // (2 * (self.capacities[0] // 2)))
        raise ConfigError(
            f"sequence {worst} of step {self.step} has {length} tokens, and {count} hdp ranks of "
            f"{' or '.join(map(str, self.capacities[:4]))} tokens ({ratio}) hold {most} at most. It would fit on "
            f"{needed} ranks without offloading, on these with {-(-length // (2 * count)) * 2} tokens a rank, or cut: "
            f"a context of {most} tokens"
        )

    def _longest_that_fits(self) -> int:
        """By bisection: what fits only grows with ranks and shrinks with tokens."""
        low, high = max(self.capacities), int(self.lengths.max())
        while low < high:
            middle = np.array([(low + high + 1) // 2])
            sizes = [
                smallest_rings(middle, capacity, self.costs, self.ranks_that_hold(capacity))[0]
                for capacity in self.capacities
            ]
            low, high = (int(middle[0]), high) if any(sizes) else (low, int(middle[0]) - 1)
        return low

    def _check_sums(self) -> None:
        """Planning adds in 64 bits.

        At most the rank-time of all sequences on their smallest rings, as rings grow only where that is faster; or the
        longest of these times on all ranks, which is what there may be room for.
        """
        if not self.lengths.size:
            return
        a, b, passing, step, constant = (float(number) for number in self.costs.numbers)
        lengths, sizes = self.lengths.astype(np.float64), self.smallest_sizes.astype(np.float64)
        base = (a * lengths**2 + b * lengths) / sizes + (passing * lengths + step * sizes) * (sizes > 1) + constant
        most = max(float((base * sizes).sum()), len(self.ranks) * float(base.max()), a * float(lengths.max()) ** 2)
        bound = 2 * most * (MILLI // int(self.ranks.speed_milli.min()) + 1)
        if bound >= 2.0**MAX_BITS:
            tokens, longest = int(self.lengths.sum()), int(self.lengths.max())
            raise ConfigError(
                f"a step of {tokens} tokens, the longest sequence having {longest}, may take {bound:.3g} ticks, which "
                f"does not fit into {MAX_BITS} bits. Use a longer tick"
            )


@final
@dataclass(frozen=True, slots=True)
class LowerBound:
    """What no plan can beat, in ticks of one layer. work: the rank-time of all sequences at their smallest rings over
    all ranks' speed. longest: the longest sequence on the best ring.
    """

    work: int
    longest: int

    @property
    def ticks(self) -> int:
        return max(self.work, self.longest)


def lower_bound(problem: BatchProblem) -> LowerBound:
    """A step's least time by two arguments, each of which holds for every plan."""
    lengths, costs, sizes = problem.lengths, problem.costs, problem.smallest_sizes
    filled = lengths > 0
    if not filled.any():
        return LowerBound(0, 0)
    lengths, sizes = lengths[filled], sizes[filled]
    work = sum((sizes * base_ticks(problem)[filled]).tolist())
    # Times on a ring only grow with the length, and so does the smallest ring.
    at = int(lengths.argmax())
    ring = np.arange(int(sizes[at]), len(problem.ranks) + 1)
    longest = int(np.min(costs.micro_batch(int(lengths[at]) ** 2, int(lengths[at]), ring)))
    speeds = problem.ranks.speed_milli
    return LowerBound(-(-work * MILLI // int(speeds.sum())), -(-longest * MILLI // int(speeds.max())))


def base_ticks(problem: BatchProblem) -> Integers:
    """Time of each sequence on its smallest ring.

    What a micro-batch costs beside is left out where several sequences may share one.
    """
    lengths, sizes = problem.lengths, problem.smallest_sizes
    found = np.asarray(problem.costs.micro_batch(lengths**2, lengths, sizes), np.int64)
    is_shared = (sizes == 1) & (lengths <= problem.capacities[0])
    return found - np.where(is_shared, problem.costs.per_micro_batch, 0)


class BatchPlanner(ABC):
    """Gives each sequence of a step its ranks and each rank its micro-batches, the same for the same input."""

    @abstractmethod
    def plan(self, problem: BatchProblem) -> BatchTable:
        """Plan one step.

        Raises:
            ConfigError: a sequence that this planner's rings cannot hold.
        """


def concatenated(parts: Sequence[Sequence[int]]) -> tuple[Integers, Integers]:
    """Lists behind each other, and where each begins, with the end of all at last."""
    first = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=first[1:])
    return first, np.array([value for part in parts for value in part], np.int64)

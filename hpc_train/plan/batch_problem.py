"""What a batch planner is given: a step's lengths, the ranks with what each can hold and do, and the costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from hpc_train.errors import ConfigError
from hpc_train.plan.batch_cost import MILLI, TICK_S, BatchCosts, Integers, longest_held, smallest_rings
from hpc_train.plan.batch_table import BatchTable

BLOCK_TOKENS = 128
"""Tokens of one block of attention (assumed: the tile of the usual GPU kernels); less is not worth a rank."""
SPEED_STEP_MILLI = 10
"""Speeds are rounded to this, so that noise in what was measured does not make every rank one of its kind (assumed)."""
MAX_BITS = 62
_LONGEST_TICK = 20
"""Powers of ten that are tried: the last is 28 hours (assumed: longer than any time of a layer)."""


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
        classes = [(capacity, self.ranks_that_hold(capacity)) for capacity in self.capacities]
        most = longest_held(classes, self.costs, length)
        ratio = "activations may be offloaded as far as copies hide" if self.costs.offload else "offload ratio 0"
        needed = -(-length // (2 * (self.capacities[0] // 2)))
        raise ConfigError(
            f"sequence {worst} of step {self.step} has {length} tokens, and {count} hdp ranks of "
            f"{' or '.join(map(str, self.capacities[:4]))} tokens ({ratio}) hold {most} at most. It would fit on "
            f"{needed} ranks without offloading, on these with {-(-length // (2 * count)) * 2} tokens a rank, or cut: "
            f"a context of {most} tokens"
        )

    def _check_sums(self) -> None:
        """Planning adds in 64 bits."""
        if not self.lengths.size:
            return
        bound = _most_ticks(self.lengths, self.smallest_sizes, self.ranks, self.costs)
        if bound >= 2.0**MAX_BITS:
            tokens, longest = int(self.lengths.sum()), int(self.lengths.max())
            raise ConfigError(
                f"a step of {tokens} tokens, the longest sequence having {longest}, may take {bound:.3g} ticks of "
                f"{self.costs.tick_s:g} s, which does not fit into {MAX_BITS} bits. Give costs in longer ticks"
            )


def _most_ticks(
    lengths: Integers, sizes: Integers, ranks: HdpRanks, costs: BatchCosts, times: float = 1.0, beside: float = 0.0
) -> float:
    """What planning may add up to.

    At most the rank-time of all sequences on their smallest rings, as rings grow only where that is faster; or the
    longest of these times on all ranks, which is what there may be room for.

    Args:
        times: So often there is each sequence.
        beside: Rank-time of others.
    """
    a, b, passing, step, constant, _, home = (float(number) for number in costs.numbers)
    passing += home
    tokens, size = lengths.astype(np.float64), sizes.astype(np.float64)
    base = (a * tokens**2 + b * tokens) / size + (passing * tokens + step * size) * (size > 1) + constant
    work = times * float((base * size).sum()) + beside
    most = max(work, len(ranks) * float(base.max()), a * float(tokens.max()) ** 2)
    return 2 * most * (MILLI // int(ranks.speed_milli.min()) + 1)


def finest_costs(costs_in: Callable[[float], BatchCosts], ranks: HdpRanks, longest: int, tokens: int) -> BatchCosts:
    """Costs in the shortest ticks with which planning stays within 64 bits: TICK_S, or longer by a power of ten.

    Args:
        costs_in: Gives them in ticks of some seconds.
        longest: Tokens of a sequence at most.
        tokens: Of a step at most.

    Raises:
        ConfigError: ticks so long leave nothing of attention.
    """
    finest = costs_in(TICK_S)
    for power in range(_LONGEST_TICK):
        costs = costs_in(TICK_S * 10**power)
        if finest.attention_per_square and not costs.attention_per_square:
            break
        if _stays_within(costs, ranks, longest, tokens):
            return costs
    raise ConfigError(
        f"steps of up to {tokens} tokens with sequences of up to {longest} cannot be planned in {MAX_BITS} bits with "
        f"these costs: attention of {finest.attention_per_square * TICK_S:.3g} s for a square of tokens, "
        f"{finest.linear_per_token * TICK_S:.3g} s a token, {finest.ring_per_token * TICK_S:.3g} s to pass one on. Use "
        "a smaller train.global_batch_size or data.seq_len, or measure again by `hpc-train profile`"
    )


def _stays_within(costs: BatchCosts, ranks: HdpRanks, longest: int, tokens: int) -> bool:
    """Steps take longest where all tokens are in the longest sequences, but for what each sequence takes at least."""
    a, b, passing, step, constant, _, home = (float(number) for number in costs.numbers)
    passing += home
    copying = 0.0 if costs.offload is None else float(costs.offload.copy_per_token)
    beside = (b + constant) * tokens
    # Sizes of rings are found in 64 bits themselves.
    alone = max(a * float(longest) ** 2, (b + passing + copying) * longest, step * len(ranks), beside)
    if 2 * alone >= 2.0**MAX_BITS:
        return False
    problem = BatchProblem(0, np.array([longest], np.int64), ranks, costs, BLOCK_TOKENS)
    without_offload = -(-longest // (2 * (problem.capacities[-1] // 2)))
    times = -(-tokens // longest)
    return all(
        _most_ticks(problem.lengths, np.array([size]), ranks, costs, times, beside) < 2.0**MAX_BITS
        for size in (int(problem.smallest_sizes[0]), min(len(ranks), without_offload))
    )


@final
@dataclass(frozen=True, slots=True)
class LowerBound:
    """What no plan can beat, in ticks of one layer. work: the least rank-time of all sequences over all ranks' speed.
    longest: the longest sequence on the best ring.
    """

    work: int
    longest: int

    @property
    def ticks(self) -> int:
        return max(self.work, self.longest)


def lower_bound(problem: BatchProblem) -> LowerBound:
    """A step's least time by two arguments, each of which holds for every plan, also where sequences share rings."""
    lengths, costs, sizes = problem.lengths, problem.costs, problem.smallest_sizes
    filled = lengths > 0
    if not filled.any():
        return LowerBound(0, 0)
    lengths, sizes = lengths[filled], sizes[filled]
    work = _least_work(lengths, sizes, costs)
    at = int(lengths.argmax())
    ring = np.arange(int(sizes[at]), len(problem.ranks) + 1)
    longest = int(np.min(costs.micro_batch(int(lengths[at]) ** 2, int(lengths[at]), ring)))
    speeds = problem.ranks.speed_milli
    return LowerBound(-(-work * MILLI // int(speeds.sum())), -(-longest * MILLI // int(speeds.max())))


def _least_work(lengths: Integers, sizes: Integers, costs: BatchCosts) -> int:
    """The rank-time that sequences take at least, in rings no smaller than `sizes`: nothing is rounded up.

    One sequence's attention may hide another's passing, and what a micro-batch and a step of a ring take beside may be
    shared, so it is left out.
    """
    on_ring = sizes > 1
    passing = int(((sizes * costs.ring_per_token - costs.ring_last_hop_per_token) * lengths)[on_ring].sum())
    attention = costs.attention_per_square * int((lengths**2).sum())
    home = costs.ring_home_per_token * int(lengths[on_ring].sum())
    return max(attention, passing) + home + costs.linear_per_token * int(lengths.sum())


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

"""Hybrid data parallelism with balance: all ranks end together, though a sequence may need many ranks at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from hpc_train.errors import ConfigError
from hpc_train.plan.batch_assemble import Laid, assemble
from hpc_train.plan.batch_cost import MILLI, Integers, smallest_rings, tokens_per_rank
from hpc_train.plan.batch_problem import BatchPlanner, BatchProblem, HdpRanks, base_ticks
from hpc_train.plan.batch_static import StaticPlanner, least_static_ticks
from hpc_train.plan.batch_table import BatchTable
from hpc_train.plan.batch_times import model_times

SPEED_CLASS_MILLI = 50
"""Ranks whose speeds differ by more lie apart, so that a ring need not wait for a slow member (assumed)."""
SHELVES_TRIED = 3
TARGETS_TRIED_MILLI = (1150, 1300, 500, 333)
"""Of the least time: rings that are smaller than that asks for, and rings of which two or three follow each other."""
WIDE = 64
"""Rings of at least the ranks over this are laid on shelves, narrower ones fill what these leave (assumed)."""
GAIN_MILLI = 5
"""A plan with larger rings has to be faster by this, since it passes more keys and values (assumed)."""


@final
@dataclass(frozen=True, slots=True)
class BalancedPlanner(BatchPlanner):
    """The longest first, each on the ranks that are furthest behind, until all sequences are given out.

    Rings are as small as the capacity allows, and larger where the step would else last longer: where one sequence
    alone takes more than its share of the step, or where equal ones do not fill the ranks. Ranks are taken in the order
    of their places, so a ring's members are near each other.

    strategy: "dp" gives least time where ranks meet in rings alone. "pp" is for ranks that are whole pipelines: each
    goes from long micro-batches to short ones, so that those in flight together are alike, and a ring has the same
    place in the lists of all its members, without which pipelines would wait for each other in a circle. num_stages: of
    such a pipeline, which needs that many micro-batches. slack_milli: how far above the least time planning stops, in
    thousandths; more slack gives smaller rings. grows_rings: false for the smallest rings always. context: the longest
    sequence of a run, whose `StaticPlanner` is then tried too where it might win more than the slack; 0: it is not.

    Source: Algorithm 2 of ByteScale (arXiv 2502.21231). Its gaps are closed so: delta is 0, ties (all ranks at first)
    go to the lower place, a sequence that needs D ranks goes to the D neighbours on which it ends first, and times come
    from the costs.
    """

    strategy: Literal["dp", "pp"] = "dp"
    num_stages: int = 1
    slack_milli: int = 40
    grows_rings: bool = True
    context: int = 0

    def plan(self, problem: BatchProblem) -> BatchTable:
        work = _Work(problem, self.num_stages)
        best: Laid | None = None
        for sizes in self._sizes_to_try(work):
            laid = work.lay(sizes)
            if best is None or laid.end * MILLI < best.end * (MILLI - GAIN_MILLI):
                best = laid
            if best.end <= work.within(self.slack_milli):
                break
        assert best is not None
        table = assemble(problem, best, is_aligned=self.strategy == "pp", fewest=self.num_stages)
        return self._or_static(problem, table) if self.context else table

    def _or_static(self, problem: BatchProblem, table: BatchTable) -> BatchTable:
        """The plan, or that of rings of one size where that one takes less time; not looked for within the slack.

        In pipelines the longest micro-batch counts as well, which each stage waits for once.
        """
        ours = model_times(table, problem.ranks, problem.costs)
        try:
            if least_static_ticks(problem, self.context) * (MILLI + self.slack_milli) >= ours.makespan * MILLI:
                return table
            static = StaticPlanner(self.context).plan(problem)
        except ConfigError:  # rings of one size do not hold the step
            return table
        theirs = model_times(static, problem.ranks, problem.costs)
        waits = self.num_stages > 1 and theirs.longest > ours.longest
        return table if waits or theirs.makespan >= ours.makespan else static

    def _sizes_to_try(self, work: _Work) -> Iterator[Integers]:
        if not self.grows_rings or not len(work.lengths):
            yield work.smallest
            return
        by_target = work.sizes_within(work.within(self.slack_milli))
        yield by_target
        yield from work.sizes_on_shelves(by_target)
        for milli in TARGETS_TRIED_MILLI:
            yield work.sizes_within(work.within(0) * milli // MILLI)
        yield work.smallest


@dataclass(frozen=True, eq=False)
class _Row:
    """The ranks by position, in an order in which runs of neighbours are looked at, with what each holds and does."""

    rank: Integers
    capacity: Integers
    speed: Integers


def _rows(ranks: HdpRanks) -> list[_Row]:
    """Ranks of one kind together, within a kind by place.

    By what they hold first, since every ring has room there; and, where kinds differ in speed too, by that first.
    """
    rank = ranks.order
    capacity, speed = -ranks.capacity_tokens[rank], -(ranks.speed_milli[rank] // SPEED_CLASS_MILLI)
    orders = [np.lexsort((speed, capacity))]
    if capacity.min() != capacity.max() and speed.min() != speed.max():
        orders.append(np.lexsort((capacity, speed)))
    return [_Row(rank[at], ranks.capacity_tokens[rank[at]], ranks.speed_milli[rank[at]]) for at in orders]


class _Work:
    """One step's sequences, the longest first, and the ranks."""

    def __init__(self, problem: BatchProblem, num_stages: int) -> None:
        self.problem, self.num_stages = problem, num_stages
        order = np.argsort(-problem.lengths, kind="stable")
        self.order = order[: int(np.count_nonzero(problem.lengths))]
        self.lengths = problem.lengths[self.order]
        self.smallest = problem.smallest_sizes[self.order]
        # A rank with less than a block of attention would mostly wait.
        in_blocks = np.minimum(self.lengths // problem.block_tokens, len(problem.ranks))
        self.largest = np.maximum(self.smallest, in_blocks)
        self.costs = np.array(problem.costs.numbers, np.int64)
        self.base = base_ticks(problem)[self.order]
        self.rows = _rows(problem.ranks)
        self.num_ranks, self.fastest = len(problem.ranks), int(problem.ranks.speed_milli.max())
        self.least = self._least()

    def _least(self) -> int:
        """The least time by area, on ranks of the fastest kind."""
        from hpc_train.plan.batch_kernels import allot

        if not len(self.lengths):
            return 0
        worth = int(self.problem.ranks.speed_milli.sum()) * MILLI // self.fastest
        return int(allot(self.costs, self.lengths, self.smallest, self.base, self.largest, worth, self.num_stages))

    def within(self, slack_milli: int) -> int:
        """The least time and some slack, in ticks as they pass."""
        return -(-self.least * (MILLI + slack_milli) // self.fastest)

    def sizes_within(self, target: int) -> Integers:
        from hpc_train.plan.batch_kernels import sizes_within

        on_fastest = target * self.fastest // MILLI // self.num_stages
        found = sizes_within(self.costs, self.lengths, self.smallest, self.base, self.largest, on_fastest)
        return np.asarray(found, np.int64)

    def sizes_on_shelves(self, sizes: Integers) -> Iterator[Integers]:
        """Rings side by side in rows, grown until a row is full: the last row, then all rows of wide rings."""
        num_ranks = self.num_ranks
        on_rings = np.flatnonzero(sizes > 1)
        before = np.cumsum(self.smallest[on_rings]) - self.smallest[on_rings]
        in_last_row = on_rings[before // num_ranks == before.max(initial=0) // num_ranks]
        yield from self._on_shelves(sizes, in_last_row, 1)
        wide = np.flatnonzero(sizes > max(1, num_ranks // WIDE))
        fewest = -(-int(self.smallest[wide].sum()) // num_ranks)
        for shelves in range(max(1, fewest), min(fewest + SHELVES_TRIED, len(wide) + 1)):
            yield from self._on_shelves(sizes, wide, shelves)

    def _on_shelves(self, sizes: Integers, chosen: Integers, num_shelves: int) -> Iterator[Integers]:
        """Chosen rings on so many shelves of about equal width, the longest together; nothing if they do not fit."""
        from hpc_train.plan.batch_kernels import shelf_sizes

        width = self.smallest[chosen]
        middle = 2 * np.cumsum(width) - width
        shelf_of = middle * num_shelves // max(1, 2 * int(width.sum()))
        found = shelf_sizes(
            self.costs, self.lengths[chosen], width, shelf_of, num_shelves, self.largest[chosen], self.num_ranks
        )
        if len(found) and found.all():
            on_shelves = sizes.copy()
            on_shelves[chosen] = found
            yield on_shelves

    def lay(self, sizes: Integers) -> Laid:
        """Rings first, then the sequences that one rank has alone, which also go into the time before rings."""
        found = [laid for laid in (self._lay(sizes, row) for row in self.rows) if laid is not None]
        return min(found, key=lambda laid: laid.end)

    def _lay(self, sizes: Integers, row: _Row) -> Laid | None:
        """None where a ring finds no run of ranks that holds it, which cannot be where they go by capacity first."""
        from hpc_train.plan.batch_kernels import assign_alone, place_rings

        is_ring = (sizes > 1) | (self.lengths > self.problem.capacities[0])
        ring_sizes, ticks, needs = self._choices(self.lengths[is_ring], sizes[is_ring])
        load, gap = np.zeros(self.num_ranks, np.int64), np.zeros(int(ring_sizes.max(axis=1, initial=0).sum()), np.int64)
        first, chosen, start = place_rings(
            ring_sizes, ticks, needs, -row.capacity, -row.speed, load, gap, self.num_stages
        )
        if first.min(initial=0) < 0:
            return None
        member = spread(first, chosen)
        gaps = np.argsort(-gap[: len(member)], kind="stable")[: np.count_nonzero(gap)]
        kind = np.unique(np.stack([row.capacity, row.speed]), axis=1, return_inverse=True)[1].reshape(-1)
        by_kind = np.lexsort((load, kind))
        first_of_kind = np.searchsorted(kind[by_kind], np.arange(int(kind.max()) + 2))
        ends = load[by_kind]
        idle, kinds = (gaps, -gap[gaps], member), (first_of_kind, by_kind, ends)
        bins = assign_alone(self.lengths[~is_ring], self.base[~is_ring], row.capacity, row.speed, idle, kinds)
        return Laid(
            rank=row.rank, rings=self.order[is_ring], sizes=chosen, start=start, members=member,
            alone=self.order[~is_ring], bins=bins, end=int(ends.max()),
        )  # fmt: skip

    def _choices(self, lengths: Integers, sizes: Integers) -> tuple[Integers, Integers, Integers]:
        """By ring and capacity: the size if all its ranks hold that much, the time, and what each rank has to hold.

        A ring that asks for more ranks than hold so much has them all, so that each has a choice that fits.
        """
        problem = self.problem
        shape = (len(lengths), len(problem.capacities))
        found, needs = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for number, capacity in enumerate(problem.capacities):
            most = problem.ranks_that_hold(capacity)
            fewest = smallest_rings(lengths, capacity, problem.costs, most)
            found[:, number] = np.where(fewest > 0, np.maximum(np.minimum(sizes, most), fewest), 0)
            needs[:, number] = np.minimum(tokens_per_rank(lengths, np.maximum(1, found[:, number])), capacity)
        column = lengths[:, None]
        ticks = np.asarray(problem.costs.micro_batch(column**2, column, np.maximum(1, found)), np.int64)
        return found, ticks.reshape(shape), needs


def spread(first: Integers, sizes: Integers) -> Integers:
    """All numbers of runs that begin at `first` and have some sizes, run behind run."""
    ends = np.cumsum(sizes)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(first - (ends - sizes), sizes)

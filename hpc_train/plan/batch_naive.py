"""Hybrid data parallelism without balance: each sequence on as few ranks as hold it, in the order of the batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from hpc_train.errors import ConfigError
from hpc_train.plan.batch_cost import offload_needed_milli, smallest_rings
from hpc_train.plan.batch_problem import BatchPlanner, BatchProblem, concatenated
from hpc_train.plan.batch_table import BatchTable


@final
@dataclass(frozen=True, slots=True)
class NaivePlanner(BatchPlanner):
    """Long sequences first, then packs of short ones, dealt out in rounds of one micro-batch for each rank.

    All ranks are taken for the smallest of them. Whoever gets nothing in a round has an empty micro-batch there.

    Source: Algorithm 1 of ByteScale (arXiv 2502.21231), which leaves the dealing open.
    """

    def plan(self, problem: BatchProblem) -> BatchTable:
        lengths, capacity, num_ranks = problem.lengths, problem.capacities[-1], len(problem.ranks)
        sizes = smallest_rings(lengths, capacity, problem.costs, num_ranks)
        if lengths.size and not sizes.min():
            raise ConfigError(
                f"a sequence of {int(lengths[sizes == 0].max())} tokens does not fit on {num_ranks} ranks of "
                f"{capacity} tokens, the smallest of the ranks; the balanced planner knows that others hold more"
            )
        is_long = lengths > capacity
        long, short = np.flatnonzero(is_long).tolist(), np.flatnonzero(~is_long)
        packs = best_fit(lengths[short].tolist(), capacity)
        contents = [[sequence] for sequence in long] + [short[pack].tolist() for pack in packs]
        wanted = sizes[long].tolist() + [1] * len(packs)
        offload = np.zeros(len(contents), np.int64)
        offload[: len(long)] = offload_needed_milli(lengths[long], sizes[long], capacity, problem.costs)
        rounds, places = deal(wanted, num_ranks)
        ranks = [problem.ranks.order[place : place + size] for place, size in zip(places, wanted, strict=True)]
        order = sorted(range(len(contents)), key=lambda pack: (rounds[pack], places[pack]))
        first_sequence, sequences = concatenated([contents[pack] for pack in order])
        first_rank, flat = concatenated([ranks[pack].tolist() for pack in order])
        number = np.array([rounds[pack] for pack in order], np.int64)
        return BatchTable(
            problem.step, lengths, first_sequence, sequences, first_rank, flat, np.repeat(number, np.diff(first_rank)),
            offload[order], np.full(num_ranks, max(rounds, default=0) + 1, np.int64),
        )  # fmt: skip


def deal(sizes: Sequence[int], num_ranks: int) -> tuple[list[int], list[int]]:
    """Round and first place of each pack: in the first round that has so many places left, behind those already there.

    Rounds that are full are passed over; a wide pack that opened a round leaves its end to narrow ones.
    """
    used: list[int] = []
    rounds, places = [], []
    open_round = 0
    for size in sizes:
        number = open_round
        while number < len(used) and used[number] + size > num_ranks:
            number += 1
        if number == len(used):
            used.append(0)
        rounds.append(number)
        places.append(used[number])
        used[number] += size
        while open_round < len(used) and used[open_round] == num_ranks:
            open_round += 1
    return rounds, places


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Packs of sequences, each the first time it comes into the pack with the least room that takes it; none is empty.

    Sequences without tokens are left out.
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for sequence, length in enumerate(lengths):
        if not length:
            continue
        at = bisect_left(rooms, (length, -1))
        if at == len(rooms):
            packs.append([sequence])
            left, pack = room, len(packs) - 1
        else:
            left, pack = rooms.pop(at)
            packs[pack].append(sequence)
        insort(rooms, (left - length, pack))
    return packs

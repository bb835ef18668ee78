"""From what goes where to a batch plan: micro-batches, their places in the ranks' lists, and the way round of rings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpc_train.plan.batch_cost import Integers, offload_needed_milli
from hpc_train.plan.batch_problem import BatchProblem
from hpc_train.plan.batch_table import BatchTable


@dataclass(frozen=True, eq=False)
class Laid:
    """Sequences with their ranks, before they are micro-batches.

    rank: by position, a place in the order in which the planner looks at ranks. rings: the sequence of each, with its
    size, start and, ring behind ring, the positions of its members. alone: sequences that one rank has, with their bin:
    the number of a member before whose ring they come, or the number of these plus the position at whose end they come.
    end: when the last rank is done.
    """

    rank: Integers
    rings: Integers
    sizes: Integers
    start: Integers
    members: Integers
    alone: Integers
    bins: Integers
    end: int


def assemble(problem: BatchProblem, laid: Laid, *, is_aligned: bool, fewest: int) -> BatchTable:
    """Make the table. is_aligned: a ring has the same place in all its members' lists. fewest: micro-batches a rank."""
    from hpc_train.plan.batch_list_kernels import lay_rings, number_micro_batches, pack_bins

    laid = _in_order_of_start(laid)
    num_ranks = len(laid.rank)
    by_bin = np.argsort(laid.bins, kind="stable")
    alone, bins = laid.alone[by_bin], laid.bins[by_bin]
    bin_position = np.concatenate([laid.members, np.arange(num_ranks)])
    bin_rank = laid.rank[bin_position]
    first_of_bin = np.searchsorted(bins, np.arange(len(bin_rank) + 1))
    number, count = pack_bins(first_of_bin, problem.lengths[alone], problem.ranks.capacity_tokens[bin_rank])
    first_member = np.concatenate([[0], np.cumsum(laid.sizes)])
    first_of_count = np.concatenate([[0], np.cumsum(count)])
    of_ring, of_alone, ring_pack, alone_pack, length = number_micro_batches(
        first_member, laid.members, first_of_count, count[len(laid.members) :].copy(), is_aligned
    )
    members = laid.rank[laid.members]
    way = np.arange(len(members))
    lay_rings(first_member, problem.ranks.host[members], problem.ranks.port[members], way)
    micro_batch_of_item = first_of_count[bins] + number
    first_sequence, sequences = _by_pack(
        np.concatenate([ring_pack, alone_pack[micro_batch_of_item]]), np.concatenate([laid.rings, alone])
    )
    first_rank, ranks, micro_batch = _by_pack(
        np.concatenate([np.repeat(ring_pack, laid.sizes), alone_pack]),
        np.concatenate([members[way], np.repeat(bin_rank, count)]),
        np.concatenate([of_ring[way], of_alone]),
    )
    offload = np.zeros(len(ring_pack) + len(alone_pack), np.int64)
    offload[ring_pack] = _offload(problem, laid)
    num_micro_batches = np.empty(num_ranks, np.int64)
    num_micro_batches[laid.rank] = np.maximum(length, max(1, fewest))
    return BatchTable(
        problem.step, problem.lengths, first_sequence, sequences, first_rank, ranks, micro_batch, offload,
        num_micro_batches,
    )  # fmt: skip


def _in_order_of_start(laid: Laid) -> Laid:
    order = np.argsort(laid.start, kind="stable")
    sizes = laid.sizes[order]
    old_first, new_first = np.cumsum(laid.sizes) - laid.sizes, np.cumsum(sizes) - sizes
    old_member = np.arange(len(laid.members)) + np.repeat(old_first[order] - new_first, sizes)
    new_bin = np.arange(len(laid.members) + len(laid.rank))
    new_bin[old_member] = np.arange(len(laid.members))
    return Laid(
        laid.rank, laid.rings[order], sizes, laid.start[order], laid.members[old_member], laid.alone,
        new_bin[laid.bins], laid.end,
    )  # fmt: skip


def _by_pack(packs: Integers, *values: Integers) -> tuple[Integers, ...]:
    """Where each pack begins, and values pack behind pack, each pack's in the order given."""
    order = np.argsort(packs, kind="stable")
    first = np.zeros(int(packs.max(initial=-1)) + 2, np.int64)
    np.cumsum(np.bincount(packs, minlength=len(first) - 1), out=first[1:])
    return first, *(value[order].astype(np.int64) for value in values)


def _offload(problem: BatchProblem, laid: Laid) -> Integers:
    """The least ratio with which each ring fits on its ranks, whose smallest capacity counts."""
    if not len(laid.sizes):
        return np.zeros(0, np.int64)
    capacity = problem.ranks.capacity_tokens[laid.rank[laid.members]]
    smallest = np.minimum.reduceat(capacity, np.cumsum(laid.sizes) - laid.sizes)
    return offload_needed_milli(problem.lengths[laid.rings], laid.sizes, smallest, problem.costs)

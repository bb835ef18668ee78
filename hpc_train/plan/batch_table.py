"""A step's batch plan as arrays: made in milliseconds for thousands of ranks, compared by eight bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from hpc_train.plan.batch import BatchPlan, MicroBatch, Ring, SequenceSlice, zigzag
from hpc_train.plan.batch_cost import Integers

DIGEST_BYTES = 8


@final
@dataclass(frozen=True, eq=False)
class BatchTable:
    """Packs: each some whole sequences that one rank, or a ring of ranks, has as one micro-batch.

    Their number is their place in the step's one order: each rank meets its packs by rising number. lengths: of the
    step's sequences. first_sequence, first_rank: where the sequences and ranks of each pack begin in `sequences` and
    `ranks`, with the end of all at last. ranks: of rings in their order. micro_batch: beside `ranks`, the place in that
    rank's list. offload_milli: of each pack. num_micro_batches: of each rank, at least 1; places without a pack are
    empty micro-batches.
    """

    step: int
    lengths: Integers
    first_sequence: Integers
    sequences: Integers
    first_rank: Integers
    ranks: Integers
    micro_batch: Integers
    offload_milli: Integers
    num_micro_batches: Integers

    @property
    def num_ranks(self) -> int:
        return len(self.num_micro_batches)

    @property
    def num_packs(self) -> int:
        return len(self.offload_milli)

    @cached_property
    def sizes(self) -> Integers:
        """Ranks of each pack."""
        return np.diff(self.first_rank)

    @cached_property
    def digest(self) -> bytes:
        """Eight bytes that differ for plans that differ, with the odds of a good hash."""
        found = hashlib.blake2b(digest_size=DIGEST_BYTES)
        arrays = (
            np.array([self.step]), self.lengths, self.first_sequence, self.sequences, self.first_rank, self.ranks,
            self.micro_batch, self.offload_milli, self.num_micro_batches,
        )  # fmt: skip
        for array in arrays:
            found.update(np.array([len(array)], "<i8").tobytes())
            found.update(np.ascontiguousarray(array, "<i8").tobytes())
        return found.digest()

    def pack_sums(self) -> tuple[Integers, Integers]:
        """The sum of the squares of the sequences' lengths of each pack, and that of their lengths."""
        lengths = self.lengths[self.sequences]
        ends = np.zeros((2, len(lengths) + 1), np.int64)
        np.cumsum(lengths**2, out=ends[0, 1:])
        np.cumsum(lengths, out=ends[1, 1:])
        squares, tokens = np.diff(ends[:, self.first_sequence], axis=1)
        return squares, tokens

    def micro_batches(self, rank: int) -> tuple[MicroBatch, ...]:
        """One rank's list."""
        found = [MicroBatch(())] * int(self.num_micro_batches[rank])
        for entry in self._entries(rank).tolist():
            pack = int(np.searchsorted(self.first_rank, entry, side="right")) - 1
            place = entry - int(self.first_rank[pack])
            found[int(self.micro_batch[entry])] = self._micro_batch(pack, place)
        return tuple(found)

    def lengths_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Of each of a rank's micro-batches the tokens of all its whole sequences, in their order.

        All members of a ring have the same, also of sequences so short that some have no piece of them.
        """
        found: list[tuple[int, ...]] = [()] * int(self.num_micro_batches[rank])
        for entry in self._entries(rank).tolist():
            pack = int(np.searchsorted(self.first_rank, entry, side="right")) - 1
            sequences = self.sequences[self.first_sequence[pack] : self.first_sequence[pack + 1]]
            found[int(self.micro_batch[entry])] = tuple(self.lengths[sequences].tolist())
        return tuple(found)

    def plan(self) -> BatchPlan:
        """All ranks' lists, which takes seconds for thousands of ranks."""
        ranks = tuple(self.micro_batches(rank) for rank in range(self.num_ranks))
        return BatchPlan(self.step, ranks, len(self.lengths))

    @cached_property
    def _by_rank(self) -> tuple[Integers, Integers]:
        order = np.argsort(self.ranks, kind="stable")
        return order, np.searchsorted(self.ranks[order], np.arange(self.num_ranks + 1))

    def _entries(self, rank: int) -> Integers:
        order, first = self._by_rank
        return order[first[rank] : first[rank + 1]]

    def _micro_batch(self, pack: int, place: int) -> MicroBatch:
        members = self.ranks[self.first_rank[pack] : self.first_rank[pack + 1]]
        slices = []
        for sequence in self.sequences[self.first_sequence[pack] : self.first_sequence[pack + 1]].tolist():
            length = int(self.lengths[sequence])
            parts = ((0, length),) if len(members) == 1 else zigzag(length, len(members), place)
            slices += [SequenceSlice(sequence, start, stop - start) for start, stop in parts if stop > start]
        ring = None if len(members) == 1 else Ring(tuple(members.tolist()), pack)
        return MicroBatch(tuple(slices), ring, int(self.offload_milli[pack]))

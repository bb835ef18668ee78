"""A rank's part of a planned micro-batch with its tokens: what is read for it, and what computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from hpc_train.plan.batch import MicroBatch, zigzag
from hpc_train.plan.batch_cost import Integers


@final
@dataclass(frozen=True, eq=False)
class PieceBatch:
    """One rank's tokens of one micro-batch, its pieces one behind the other in the plan's order.

    A sequence of the plan is a document, or a piece of one that is trained on by itself: its tokens see each other and
    no others, and their positions count from its first one.

    rank: of the hdp axis. micro_batch: the plan's, with no sequences where the rank has no work. lengths: of all its
    sequences, from `BatchTable.lengths_of`. tokens, labels (-100: not supervised): (num_tokens,) int64; where they are
    not needed, zeros will do.

    Raises:
        ValueError: pieces, lengths, tokens and labels do not go together.
    """

    rank: int
    micro_batch: MicroBatch
    lengths: tuple[int, ...]
    tokens: Integers
    labels: Integers

    def __post_init__(self) -> None:
        planned = [(piece.start, piece.start + piece.length) for piece in self.micro_batch.sequences]
        held = [part for length in self.lengths for part in self._parts(length)]
        if planned != held:
            raise ValueError(
                f"rank {self.rank} is to have the pieces {planned[:4]}, and sequences of {self.lengths[:4]} tokens "
                f"give it {held[:4]}, to name the first ones"
            )
        if not len(self.tokens) == len(self.labels) == self.num_tokens:
            raise ValueError(
                f"a micro-batch of {self.num_tokens} tokens came with {len(self.tokens)} tokens and "
                f"{len(self.labels)} labels"
            )

    @property
    def num_tokens(self) -> int:
        return self.micro_batch.num_tokens

    @property
    def num_supervised(self) -> int:
        return int((self.labels != -100).sum())

    @property
    def members(self) -> tuple[int, ...]:
        """The hdp ranks that share its sequences, in the order of their ring; this rank alone where there is none."""
        return (self.rank,) if self.micro_batch.ring is None else self.micro_batch.ring.ranks

    @property
    def place(self) -> int:
        """This rank's among the members."""
        return self.members.index(self.rank)

    @property
    def sum_of_lengths(self) -> int:
        """Over its tokens, the length of the sequence of each: what attention's work goes by."""
        return sum(length * (stop - start) for length in self.lengths for start, stop in self._parts(length))

    def positions(self) -> Integers:
        """Of each token its place in its sequence."""
        return _joined([np.arange(piece.start, piece.start + piece.length) for piece in self.micro_batch.sequences])

    def sequences(self) -> Integers:
        """Of each token the number of its sequence in the step."""
        return _joined([np.full(piece.length, piece.sequence) for piece in self.micro_batch.sequences])

    def _parts(self, length: int) -> list[tuple[int, int]]:
        num_members = len(self.members)
        parts = ((0, length),) if num_members == 1 else zigzag(length, num_members, self.place)
        return [(start, stop) for start, stop in parts if stop > start]


def _joined(parts: Sequence[Integers]) -> Integers:
    return np.concatenate([np.zeros(0, np.int64), *parts])

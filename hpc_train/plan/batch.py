"""Plan a step's batch: which piece of which sequence goes to which data-parallel rank and micro-batch.

The training loop consumes nothing but a `BatchPlan`, so a planner may give a sequence to several ranks, or
ranks unequal numbers of micro-batches, without the loop knowing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from hpc_train.errors import ConfigError
from hpc_train.plan.changes import SizesError, largest_divisor, one_of


@final
@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """Tokens [start, start + length) of one of the step's sequences (an index into the step's rows)."""

    sequence: int
    start: int
    length: int


@final
@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks that share a micro-batch's sequences; each sends keys and values to the next, the last to the first.

    order: the ring's place in the step's one order of rings. Each rank meets its rings by rising order, which is what
    keeps rings that share ranks from waiting for each other.
    """

    ranks: tuple[int, ...]
    order: int


@final
@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one rank computes in one forward and backward; nothing at all where it has no sequences.

    ring: None where the sequences are this rank's alone; else all its sequences are shared by that ring, and this rank
    has of each the two parts that `zigzag` gives to its place. offload_milli: thousandths of the activations of all
    layers but the two that stay which are kept off the device between forward and backward.
    """

    sequences: tuple[SequenceSlice, ...]
    ring: Ring | None = None
    offload_milli: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(piece.length for piece in self.sequences)


@final
@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step: for each data-parallel rank its micro-batches, in order."""

    step: int
    ranks: tuple[tuple[MicroBatch, ...], ...]
    num_sequences: int

    @property
    def dp(self) -> int:
        return len(self.ranks)

    @property
    def num_tokens(self) -> int:
        return sum(micro_batch.num_tokens for rank in self.ranks for micro_batch in rank)

    def micro_batches(self, rank: int) -> tuple[MicroBatch, ...]:
        """One rank's list."""
        return self.ranks[rank]


def plan_batch_static(step: int, num_sequences: int, seq_len: int, micro_batch_size: int, dp: int) -> BatchPlan:
    """Give each rank an equal, contiguous block of whole sequences, micro_batch_size at a time.

    Raises:
        ConfigError: a size below 1, or num_sequences is no multiple of dp * micro_batch_size.
    """
    check_batch_sizes(num_sequences, micro_batch_size, dp)
    if seq_len < 1:
        raise ConfigError(f"seq_len={seq_len}: a sequence needs at least 1 token.")
    per_rank = num_sequences // dp

    def micro_batch(first: int) -> MicroBatch:
        return MicroBatch(tuple(SequenceSlice(i, 0, seq_len) for i in range(first, first + micro_batch_size)))

    ranks = tuple(
        tuple(micro_batch(first) for first in range(rank * per_rank, (rank + 1) * per_rank, micro_batch_size))
        for rank in range(dp)
    )
    return BatchPlan(step, ranks, num_sequences)


def zigzag(length: int, num_ranks: int, place: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Start and stop of the two parts of a sequence that the rank at a place of a ring has.

    Of 2 * num_ranks parts, as equal as tokens allow, these are number `place` and the one as far from the end. So all
    ranks have equal shares of the tokens and of the causal mask. Short sequences leave parts empty.
    """
    parts = 2 * num_ranks

    def part(number: int) -> tuple[int, int]:
        return number * length // parts, (number + 1) * length // parts

    return part(place), part(parts - 1 - place)


def check_batch_sizes(global_batch_size: int, micro_batch_size: int, dp: int) -> None:
    """Refuse sizes that do not fill every rank equally, naming the nearest that do.

    Raises:
        ConfigError: with the nearest valid sizes.
    """
    for name, value in (
        ("global_batch_size", global_batch_size),
        ("micro_batch_size", micro_batch_size),
        ("dp", dp),
    ):
        if value < 1:
            raise ConfigError(f"{name}={value}: it must be at least 1.")
    unit = dp * micro_batch_size
    if global_batch_size % unit:
        below = global_batch_size // unit * unit
        sizes = [below, below + unit] if below else [unit]
        each = None if global_batch_size % dp else largest_divisor(global_batch_size // dp, micro_batch_size - 1)
        by_rank = [] if each is None else [each]
        raise SizesError(
            f"global_batch_size={global_batch_size} is not a multiple of dp * micro_batch_size = {dp} * "
            f"{micro_batch_size} = {unit}.",
            one_of("train.global_batch_size", sizes) + one_of("train.micro_batch_size", by_rank),
            f"Use global_batch_size={' or '.join(map(str, sizes))}, or another micro_batch_size or number of ranks.",
        )


def check_plan(plan: BatchPlan, sequence_lengths: Sequence[int]) -> None:
    """Check that every token of every sequence is assigned exactly once.

    Raises:
        ValueError: a token is lost or given twice, or a slice lies outside its sequence.
    """
    if plan.num_sequences != len(sequence_lengths):
        raise ValueError(
            f"the plan of step {plan.step} has {plan.num_sequences} sequences, not {len(sequence_lengths)}"
        )
    slices: list[list[tuple[int, int]]] = [[] for _ in sequence_lengths]
    for rank in plan.ranks:
        for micro_batch in rank:
            for piece in micro_batch.sequences:
                if not 0 <= piece.sequence < plan.num_sequences:
                    raise ValueError(f"{piece} of a step with {plan.num_sequences} sequences")
                slices[piece.sequence].append((piece.start, piece.start + piece.length))
    for sequence, (pieces, length) in enumerate(zip(slices, sequence_lengths, strict=True)):
        end = 0
        for start, stop in sorted(pieces):
            if start != end or stop <= start:
                raise ValueError(
                    f"sequence {sequence} is cut at {sorted(pieces)}: token {min(start, end)} is not given once"
                )
            end = stop
        if end != length:
            raise ValueError(f"sequence {sequence} has {length} tokens, and the plan gives out {end} of them")

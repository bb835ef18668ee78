"""Refuses a batch plan that loses tokens, overfills ranks or makes rings wait for each other, whoever made it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpc_train.plan.batch import BatchPlan, MicroBatch, Ring, SequenceSlice, check_plan, zigzag
from hpc_train.plan.batch_cost import MILLI, RESIDENT_LAYERS


def check_batch_plan(
    plan: BatchPlan,
    sequence_lengths: Sequence[int],
    capacity_tokens: Sequence[int],
    *,
    num_layers: int = 1,
    is_aligned: bool = False,
) -> None:
    """Check a plan by itself, without knowing its planner.

    Args:
        capacity_tokens: What a micro-batch of each rank may have at most.
        num_layers: Of a rank; with offloading it tells how many tokens more fit.
        is_aligned: A ring must have the same place in the lists of all its members, as pipelines need it.

    Raises:
        ValueError: a token is lost or given twice; a rank has more tokens than it holds, no micro-batch, or an offload
            ratio that is none; a ring whose members do not agree on it, have other parts than their places' or meet
            their rings in orders that do not go together.
    """
    check_plan(plan, sequence_lengths)
    if len(plan.ranks) != len(capacity_tokens):
        raise ValueError(f"the plan has {len(plan.ranks)} ranks, not {len(capacity_tokens)}")
    for rank, micro_batches in enumerate(plan.ranks):
        if not micro_batches:
            raise ValueError(f"rank {rank} has no micro-batch; one without sequences is the least")
        for index, micro_batch in enumerate(micro_batches):
            where = f"micro-batch {index} of rank {rank}"
            _check_load(micro_batch, int(capacity_tokens[rank]), num_layers, where)
            if micro_batch.ring is None:
                _check_whole(micro_batch, sequence_lengths, where)
            else:
                _check_place(micro_batch, micro_batch.ring, rank, sequence_lengths, where)
    _check_agreement(plan, is_aligned)
    _check_order(plan)


def _check_load(micro_batch: MicroBatch, capacity: int, num_layers: int, where: str) -> None:
    ratio = micro_batch.offload_milli
    if not 0 <= ratio <= MILLI:
        raise ValueError(f"{where} has the offload ratio {ratio} of {MILLI}")
    if ratio and num_layers <= RESIDENT_LAYERS:
        raise ValueError(
            f"{where} offloads {ratio} of {MILLI}, but {RESIDENT_LAYERS} layers stay, and there are no more"
        )
    staying = RESIDENT_LAYERS * MILLI + (MILLI - ratio) * (num_layers - RESIDENT_LAYERS)
    held = micro_batch.num_tokens * (staying if ratio else MILLI * num_layers)
    if held > capacity * MILLI * num_layers:
        raise ValueError(
            f"{where} has {micro_batch.num_tokens} tokens with the offload ratio {ratio} of {MILLI}; the rank holds "
            f"{capacity}"
        )


def _check_whole(micro_batch: MicroBatch, lengths: Sequence[int], where: str) -> None:
    for piece in micro_batch.sequences:
        if piece.length != lengths[piece.sequence]:
            raise ValueError(f"{where} has {piece}, a part of a sequence, and no ring that has the rest")


def _check_place(micro_batch: MicroBatch, ring: Ring, rank: int, lengths: Sequence[int], where: str) -> None:
    """Its ring is one, it is in it, and it has the parts of its place."""
    if len(ring.ranks) < 2 or len({*ring.ranks}) != len(ring.ranks):
        raise ValueError(f"{where} has the ring {ring.ranks}, which is none")
    if rank not in ring.ranks:
        raise ValueError(f"{where} has the ring {ring.ranks}, which is without its rank")
    place = ring.ranks.index(rank)
    sequences = dict.fromkeys(piece.sequence for piece in micro_batch.sequences)
    wanted = [
        SequenceSlice(sequence, start, stop - start)
        for sequence in sequences
        for start, stop in zigzag(lengths[sequence], len(ring.ranks), place)
        if stop > start
    ]
    if list(micro_batch.sequences) != wanted:
        raise ValueError(f"{where} has {list(micro_batch.sequences)}, and place {place} of its ring has {wanted}")


def _rings(plan: BatchPlan) -> Iterator[tuple[int, int, MicroBatch, Ring]]:
    for rank, micro_batches in enumerate(plan.ranks):
        for index, micro_batch in enumerate(micro_batches):
            if micro_batch.ring is not None:
                yield rank, index, micro_batch, micro_batch.ring


def _check_agreement(plan: BatchPlan, is_aligned: bool) -> None:
    """Members of a ring name the same members, ratio and, if need be, place in their lists; and all are there."""
    known: dict[int, tuple[Ring, int, int]] = {}
    there: dict[int, set[int]] = {}
    for rank, index, micro_batch, ring in _rings(plan):
        first, ratio, place = known.setdefault(ring.order, (ring, micro_batch.offload_milli, index))
        if first != ring or ratio != micro_batch.offload_milli:
            raise ValueError(f"rank {rank} and rank {first.ranks[0]} do not have the same ring {ring.order}")
        if is_aligned and place != index:
            raise ValueError(f"ring {ring.order} is micro-batch {index} of rank {rank}, and {place} of another member")
        if rank in there.setdefault(ring.order, set()):
            raise ValueError(f"rank {rank} meets ring {ring.order} twice")
        there[ring.order].add(rank)
    for order, (ring, _, _) in known.items():
        missing = {*ring.ranks} - there[order]
        if missing:
            raise ValueError(f"ring {order} waits for rank {min(missing)}, which does not meet it")


def _check_order(plan: BatchPlan) -> None:
    """Each rank meets its rings by rising order, so the first ring that is not over never waits for another one."""
    last: dict[int, int] = {}
    for rank, _, _, ring in _rings(plan):
        if last.get(rank, -1) >= ring.order:
            raise ValueError(f"rank {rank} meets ring {ring.order} after ring {last[rank]}: rings may wait in a circle")
        last[rank] = ring.order

"""What a stage keeps of micro-batches at its fullest moment: activations until B, queued weight gradients until W."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.plan.schedule import Op
from hpc_train.plan.schedule_orders import Kind, shortened_work


@dataclass(frozen=True)
class InFlight:
    """forwarded: of each model_chunk, the micro-batches between F and B. queued: those between B and W."""

    forwarded: tuple[int, ...]
    queued: tuple[int, ...]
    num_bytes: int


def most_in_flight(
    kind: Kind,
    num_stages: int,
    num_micro_batches: int,
    stage: int,
    kept_bytes: Sequence[int],
    queued_bytes: Sequence[int],
) -> InFlight:
    """The moment at which a stage keeps most.

    Args:
        kept_bytes: Of each of its model_chunks, what a micro-batch's forward keeps for B.
        queued_bytes: What its B keeps for W; not counted where the schedule does not split the backward.
    """
    num_chunks = len(kept_bytes)
    if kind == "1f1b" and num_chunks == 1:
        count = min(num_stages - stage, num_micro_batches)
        return InFlight((count,), (0,), count * kept_bytes[0])
    forwarded, queued, now = [0] * num_chunks, [0] * num_chunks, 0
    fullest = InFlight(tuple(forwarded), tuple(queued), 0)
    for action in shortened_work(kind, num_stages, num_micro_batches, num_chunks)[stage]:
        own = action.model_chunk
        if action.op is Op.F:
            forwarded[own] += 1
            now += kept_bytes[own]
        elif action.op is Op.B:
            forwarded[own] -= 1
            now -= kept_bytes[own]
            if kind == "zero_bubble":
                queued[own] += 1
                now += queued_bytes[own]
        else:
            queued[own] -= 1
            now -= queued_bytes[own]
        if now > fullest.num_bytes:
            fullest = InFlight(tuple(forwarded), tuple(queued), now)
    return fullest

"""What each stage of a pipeline does, in order, as values. `schedule_orders` plans them.

A pipeline is cut into global chunks of layers, 0 at the embedding; a stage holds one or more of them, its
model_chunks. Its list of actions is executed in order, by these rules:

- F, B and W keep the stage busy. F and B first wait for what they need from another stage.
- `send` and `recv` are posted and not waited for: a recv is awaited by the F or B that needs it, a send at the
  end of the list, or by a later send with `sends_over`. So a recv that stands before an earlier F or B is received
  beside it.
- Between two stages each direction is one channel, and the k-th send of a channel meets its k-th recv. NCCL
  matches by that order and has no tags; as operations of one communicator run one after another, an executor on
  NCCL needs a communicator for each direction: UP to stages of a higher number, DOWN to those of a lower one,
  whatever the payload. Where chunks go round, the last stage sends activations DOWN to the first.
- `all_gather` and `reduce_scatter` of a model_chunk meet the same stage of the other pipelines; they are awaited
  by the chunk's first F, and at the end of the list.
- `update` of a model_chunk waits for its reduce_scatter, updates this rank's shard, and begins the gather that the next
  step's first F of the chunk waits for, so that the next list's all_gather of it has nothing to do.
- `offload` and `reload` move a micro-batch's activations off the device after F and back before B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import final, overload


class Op(StrEnum):
    """B is the whole backward, or that of the inputs alone in a schedule that has W, the backward of the weights."""

    F = "F"
    B = "B"
    W = "W"
    SEND = "send"
    RECV = "recv"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    UPDATE = "update"
    OFFLOAD = "offload"
    RELOAD = "reload"


COMPUTE = frozenset({Op.F, Op.B, Op.W})
TRANSFERS = frozenset({Op.SEND, Op.RECV})
COLLECTIVES = frozenset({Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.UPDATE})


class Payload(StrEnum):
    """What travels between stages: activations from F to F, gradients of them from B to B."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


class Direction(StrEnum):
    """Which way a message goes: to a stage of a higher or of a lower number."""

    UP = "up"
    DOWN = "down"

    @staticmethod
    def of(sender: int, receiver: int) -> Direction:
        return Direction.UP if receiver > sender else Direction.DOWN


_TEXTS = {
    Op.F: "the forward",
    Op.B: "the backward",
    Op.W: "the weight gradient",
    Op.ALL_GATHER: "the all-gather",
    Op.REDUCE_SCATTER: "the reduce-scatter",
    Op.UPDATE: "the early update",
    Op.OFFLOAD: "the offload",
    Op.RELOAD: "the reload",
}


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a stage's list.

    micro_batch: None for collectives, which are of a whole model_chunk. model_chunk: the stage's own, the one that
    made what is sent or needs what is received. peer, payload: of send and recv only. sends_over: how many of the
    stage's sends to the peer, the oldest first, are over beside those that were before. Of a recv, when it has come:
    their receiver used them before it made what comes. Of a send, before it is posted, which waits for them.
    """

    op: Op
    micro_batch: int | None = None
    model_chunk: int = 0
    peer: int | None = None
    payload: Payload | None = None
    sends_over: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        transfer = self.op in TRANSFERS
        if (self.peer is not None) != transfer or (self.payload is not None) != transfer:
            raise ValueError(f"{self.op} has peer={self.peer} and payload={self.payload}: send and recv need both")
        if (self.micro_batch is None) != (self.op in COLLECTIVES):
            raise ValueError(
                f"{self.op} has micro_batch={self.micro_batch}: collectives have none, other actions need one"
            )

    def describe(self) -> str:
        """In words for messages: `the send of activation 3 to stage 1`."""
        chunk = f" in model_chunk {self.model_chunk}" if self.model_chunk else ""
        if self.op in TRANSFERS:
            toward = "to" if self.op is Op.SEND else "from"
            return f"the {self.op} of {self.payload} {self.micro_batch}{chunk} {toward} stage {self.peer}"
        if self.op in COLLECTIVES:
            return f"{_TEXTS[self.op]} of model_chunk {self.model_chunk}"
        return f"{_TEXTS[self.op]} of micro-batch {self.micro_batch}{chunk}"


@final
class StageLists(Sequence[Sequence[Action]]):
    """The list of each stage, made when it is first asked for: a rank executes its own one alone."""

    def __init__(self, num_stages: int, make: Callable[[int], Sequence[Action]]) -> None:
        self._made: list[Sequence[Action] | None] = [None] * num_stages
        self._make = make

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, stage: int) -> Sequence[Action]: ...
    @overload
    def __getitem__(self, stage: slice) -> Sequence[Sequence[Action]]: ...
    def __getitem__(self, stage: int | slice) -> Sequence[Action] | Sequence[Sequence[Action]]:
        if isinstance(stage, slice):
            return [self[each] for each in range(len(self))[stage]]
        made = self._made[stage]
        if made is None:
            made = self._made[stage] = self._make(range(len(self))[stage])
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


@dataclass(frozen=True)
class Schedule:
    """One pipeline's step: a list of actions for each stage. `check_schedule.check_schedule` says if it is sound.

    chunks: for each stage the global chunk of each of its model_chunks; every global chunk is in exactly one place.
    min_micro_batches: how many its planner needs; fewer are refused.
    """

    num_micro_batches: int
    chunks: tuple[tuple[int, ...], ...]
    actions: Sequence[Sequence[Action]]
    min_micro_batches: int = 1

    def __post_init__(self) -> None:
        places = sorted(chunk for stage in self.chunks for chunk in stage)
        if not self.chunks or len({len(stage) for stage in self.chunks}) != 1 or places != list(range(len(places))):
            raise ValueError(f"chunks={self.chunks} does not give every stage as many chunks and each chunk one stage")
        if len(self.actions) != len(self.chunks):
            raise ValueError(f"{len(self.actions)} lists of actions for {len(self.chunks)} stages; give one for each")

    @property
    def num_stages(self) -> int:
        return len(self.chunks)

    @property
    def num_model_chunks(self) -> int:
        return len(self.chunks[0])

    @property
    def num_global_chunks(self) -> int:
        return self.num_stages * self.num_model_chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether B is the backward of the inputs alone, since the schedule has W actions."""
        return any(action.op is Op.W for stage in self.actions for action in stage)

    @cached_property
    def has_early_updates(self) -> bool:
        return any(action.op is Op.UPDATE for stage in self.actions for action in stage)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Stage and model_chunk of each global chunk."""
        return places_of(self.chunks)


def places_of(chunks: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Stage and model_chunk of each global chunk, from the global chunks of each stage."""
    by_chunk = {chunk: (stage, own) for stage, held in enumerate(chunks) for own, chunk in enumerate(held)}
    return tuple(by_chunk[chunk] for chunk in range(len(by_chunk)))


def source_of(action: Action, stage: int, chunks: Sequence[Sequence[int]]) -> int | None:
    """The global chunk whose output an F or B needs, or None where a micro-batch enters or its loss is made."""
    if action.op is Op.F:
        chunk = chunks[stage][action.model_chunk] - 1
        return chunk if chunk >= 0 else None
    if action.op is Op.B:
        chunk = chunks[stage][action.model_chunk] + 1
        return chunk if chunk < sum(map(len, chunks)) else None
    return None

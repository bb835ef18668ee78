"""A node's part of a step, read once and put into one segment of shared memory."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from hpc_train.cluster.limits import available_memory_bytes
from hpc_train.cluster.memory_segment import Segment
from hpc_train.data.pieces import PiecePart, PieceReader, piece_parts
from hpc_train.data.rows import Row, RowReader, copy_part, part_of
from hpc_train.data.step_files import StepFiles
from hpc_train.data.steps import Step, Steps
from hpc_train.errors import ConfigError
from hpc_train.plan.batch import MicroBatch
from hpc_train.plan.batch_setup import BatchSetup
from hpc_train.plan.batch_table import BatchTable

if TYPE_CHECKING:
    from hpc_train.config import DataConfig, TrainConfig

_VALUE_BYTES = 2 * 4
"""Of a token and its label, int32 each."""


class Reading(Protocol):
    """A rank of the node: its place on the dp axis, and whether it needs tokens."""

    @property
    def place(self) -> int: ...

    @property
    def wants_tokens(self) -> bool: ...


def spec_of(
    data: DataConfig, train: TrainConfig, *, vocab_size: int, dp: int, batches: BatchSetup | None = None
) -> dict[str, Any]:
    """All that says what is read, as JSON; the same on every rank."""
    wanted = {"steps", "global_batch_size", "micro_batch_size", "seed", "eval_batches"}
    return {
        "data": data.model_dump(mode="json"),
        "train": train.model_dump(mode="json", include=wanted),
        "vocab_size": vocab_size,
        "dp": dp,
        "batches": None if batches is None else batches.to_json(),
    }


def _sections(spec: Mapping[str, Any]) -> tuple[Any, Any]:
    """The sections of a spec, by attribute. The ranks have checked them, and what checks them takes 10 MB."""
    data = dict(spec["data"])
    for name in ("train", "heldout"):
        data[name] = tuple(SimpleNamespace(**source) for source in data[name])
    return SimpleNamespace(**data), SimpleNamespace(**spec["train"])


@final
@dataclass
class PreparedStep:
    """One step of a node. parts, offsets: of each place its micro-batches, and where they begin in the segment.

    state: the position behind it. digest: of the batch plan, in hexadecimal; empty where rows are of equal length.
    not_taken: ranks that have not got it yet. is_end: there is no such step.
    """

    parts: Mapping[int, list[dict[str, Any]]] = field(default_factory=dict)
    offsets: Mapping[int, list[int]] = field(default_factory=dict)
    segment: Segment | None = None
    state: Mapping[str, Any] | None = None
    digest: str = ""
    is_end: bool = False
    not_taken: set[int] = field(default_factory=set)

    def message_for(self, place: int, *, with_tokens: bool) -> dict[str, Any]:
        if self.is_end:
            return {"end": True}
        message = {"parts": self.parts[place], "state": self.state, "plan": self.digest}
        return {**message, "offsets": self.offsets[place]} if with_tokens else message

    def close(self) -> None:
        if self.segment is not None:
            self.segment.close()


class Places(ABC):
    """What places of a node get of one step: micro-batches, each with tokens and labels and something to be known."""

    @abstractmethod
    def sizes(self, place: int) -> list[int]:
        """Tokens of each micro-batch."""

    @abstractmethod
    def fill(self, targets: Mapping[int, Sequence[NDArray[np.int32]]]) -> None:
        """Read what places get into arrays, each of tokens and of labels behind them."""

    @abstractmethod
    def outlines(self, place: int) -> list[dict[str, Any]]:
        """What is to be known of each micro-batch beside, as JSON; after `fill`."""


@final
class RowPlaces(Places):
    """Rows of equal length."""

    def __init__(self, step: Step, reader: RowReader) -> None:
        self._step, self._reader = step, reader
        self._rows: dict[int, Row] = {}

    def sizes(self, place: int) -> list[int]:
        return [len(part.sequences) * part.sequences[0].length for part in self._parts(place)]

    def fill(self, targets: Mapping[int, Sequence[NDArray[np.int32]]]) -> None:
        self._rows |= self._reader.read(self._step, {number for place in targets for number in self._sequences(place)})
        for place, of_place in targets.items():
            for part, target in zip(self._parts(place), of_place, strict=True):
                copy_part(part, self._rows, target.reshape(2, len(part.sequences), -1))

    def outlines(self, place: int) -> list[dict[str, Any]]:
        unread = self._sequences(place) - self._rows.keys()
        rows = self._rows | self._reader.outline(self._step, unread)
        return [part_of(part, rows).to_json() for part in self._parts(place)]

    def _parts(self, place: int) -> Sequence[MicroBatch]:
        return self._step.plan.micro_batches(place)

    def _sequences(self, place: int) -> set[int]:
        return {piece.sequence for part in self._parts(place) for piece in part.sequences}


@final
class PiecePlaces(Places):
    """Pieces of sequences that ranks share."""

    def __init__(self, step: Step, table: BatchTable, reader: PieceReader) -> None:
        self._step, self._table, self._reader = step, table, reader
        self._known: dict[int, list[PiecePart]] = {}

    def sizes(self, place: int) -> list[int]:
        return [part.micro_batch.num_tokens for part in self._parts(place)]

    def fill(self, targets: Mapping[int, Sequence[NDArray[np.int32]]]) -> None:
        wanted = [
            (part, target.reshape(2, -1))
            for place, of_place in targets.items()
            for part, target in zip(self._parts(place), of_place, strict=True)
        ]
        self._reader.read(self._step, wanted)

    def outlines(self, place: int) -> list[dict[str, Any]]:
        return [part.to_json() for part in self._parts(place)]

    def _parts(self, place: int) -> list[PiecePart]:
        if place not in self._known:
            self._known[place] = piece_parts(self._table, place)
        return self._known[place]


@final
class NodeSteps:
    """Plans steps and reads the union of what the ranks of a node get of them. For one thread."""

    def __init__(self, spec: Mapping[str, Any], num_at_once: int) -> None:
        """Open the datasets that `spec_of` named. num_at_once: steps that are in memory at the most.

        Raises:
            ConfigError, DataError: as `Steps`.
        """
        data, train = _sections(spec)
        batches = None if spec["batches"] is None else BatchSetup.from_json(spec["batches"])
        vocab_size = spec["vocab_size"]
        self._steps = Steps(data, train, vocab_size=vocab_size, dp=spec["dp"], batches=batches)
        self._files = StepFiles(self._steps, vocab_size=vocab_size)
        self._rows, self._pieces = RowReader(self._files, seq_len=data.seq_len), PieceReader(self._files)
        self._num_steps = 0
        self._largest_bytes = 0
        self._num_at_once = num_at_once
        self._is_checked = False

    @property
    def has_heldout(self) -> bool:
        return self._steps.has_heldout

    def describe(self) -> str:
        """In words for the log."""
        sources = self._steps.sources
        tokens = sum(int(source.lengths.sum()) for source in sources.train)
        return f"{len(sources.train)} datasets of {tokens} tokens, {len(sources.heldout)} held-out ones"

    def summary(self) -> str:
        """What was done, in words for the log."""
        used, largest = self._files.bytes_used, self._largest_bytes
        return f"{self._num_steps} steps from {used} bytes of the datasets; the largest segment had {largest} bytes"

    def state(self) -> dict[str, Any]:
        return self._steps.state()

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        return self._steps.restore(state)

    def heldout_steps(self) -> Iterator[Step]:
        return self._steps.heldout_steps()

    def prepare(self, number: int, ranks: Sequence[Reading]) -> PreparedStep:
        """Read the next step, which has this number."""
        step = self._steps.next_step(number)
        return self._read(step, ranks, f"data.step_{number}", self._steps.state())

    def prepare_heldout(self, step: Step | None, ranks: Sequence[Reading]) -> PreparedStep:
        """Read a step of `heldout_steps`; None is behind the last."""
        if step is None:
            return PreparedStep(is_end=True)
        return self._read(step, ranks, f"data.heldout_{step.plan.step}", None)

    def close(self) -> None:
        self._files.close()

    def _read(self, step: Step, ranks: Sequence[Reading], label: str, state: Mapping[str, Any] | None) -> PreparedStep:
        places = sorted({rank.place for rank in ranks})
        with_tokens = sorted({rank.place for rank in ranks if rank.wants_tokens})
        of_step: Places = RowPlaces(step, self._rows)
        digest = ""
        if isinstance(step.plan, BatchTable):
            of_step, digest = PiecePlaces(step, step.plan, self._pieces), step.plan.digest.hex()
        sizes = {place: of_step.sizes(place) for place in with_tokens}
        num_bytes = sum(map(sum, sizes.values())) * _VALUE_BYTES
        self._check_memory(num_bytes)
        segment, offsets = None, {}
        if num_bytes:
            segment = Segment.create(label, num_bytes)
            try:
                memory = segment.map(writable=True)
                offsets = _fill(memory, of_step, sizes)
                memory.close()
                segment.seal()
            except BaseException:
                segment.close()
                raise
        self._num_steps += 1
        self._largest_bytes = max(self._largest_bytes, num_bytes)
        return PreparedStep({place: of_step.outlines(place) for place in places}, offsets, segment, state, digest)

    def _check_memory(self, num_bytes: int) -> None:
        """Refuse at the first step what would end the job by the kernel's hand later."""
        if self._is_checked:
            return
        self._is_checked = True
        check_memory(num_bytes, available_memory_bytes(), self._num_at_once)


def check_memory(step_bytes: int, available_bytes: int | None, num_at_once: int) -> None:
    """Refuse steps of which so many do not fit into memory at once.

    Raises:
        ConfigError: with both sizes.
    """
    if available_bytes is not None and num_at_once * step_bytes > available_bytes:
        raise ConfigError(
            f"a step has {step_bytes / 2**20:.0f} MiB of tokens and labels for the ranks of this node, of which up to "
            f"{num_at_once} are in memory at once, and {available_bytes / 2**20:.0f} MiB are available. Lower "
            "train.global_batch_size, or use more nodes."
        )


def _fill(memory: mmap.mmap, of_step: Places, sizes: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Put the places' micro-batches one behind another; gives where each begins, in bytes."""
    offsets: dict[int, list[int]] = {}
    targets: dict[int, list[NDArray[np.int32]]] = {}
    at = 0
    for place, of_place in sizes.items():
        offsets[place], targets[place] = [], []
        for num_tokens in of_place:
            offsets[place].append(at)
            targets[place].append(np.frombuffer(memory, np.int32, 2 * num_tokens, at))
            at += _VALUE_BYTES * num_tokens
    of_step.fill(targets)
    return offsets

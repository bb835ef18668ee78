"""A node's part of a step, read once and put into one segment of shared memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from hpc_train.cluster.limits import available_memory_bytes
from hpc_train.cluster.memory_segment import Segment
from hpc_train.data.node_reader import STEPS_AHEAD
from hpc_train.data.rows import Row, RowReader, copy_part, part_of
from hpc_train.data.steps import Step, Steps
from hpc_train.errors import ConfigError
from hpc_train.plan.batch import MicroBatch

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


def spec_of(data: DataConfig, train: TrainConfig, *, vocab_size: int, dp: int) -> dict[str, Any]:
    """All that says what is read, as JSON; the same on every rank."""
    wanted = {"steps", "global_batch_size", "micro_batch_size", "seed", "eval_batches"}
    return {
        "data": data.model_dump(mode="json"),
        "train": train.model_dump(mode="json", include=wanted),
        "vocab_size": vocab_size,
        "dp": dp,
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

    state: the position behind it. not_taken: ranks that have not got it yet. is_end: there is no such step.
    """

    parts: Mapping[int, list[dict[str, Any]]] = field(default_factory=dict)
    offsets: Mapping[int, list[int]] = field(default_factory=dict)
    segment: Segment | None = None
    state: Mapping[str, Any] | None = None
    is_end: bool = False
    not_taken: set[int] = field(default_factory=set)

    def message_for(self, place: int, *, with_tokens: bool) -> dict[str, Any]:
        if self.is_end:
            return {"end": True}
        message = {"parts": self.parts[place], "state": self.state}
        return {**message, "offsets": self.offsets[place]} if with_tokens else message

    def close(self) -> None:
        if self.segment is not None:
            self.segment.close()


@final
class NodeSteps:
    """Plans steps and reads the union of what the ranks of a node get of them. For one thread."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """Open the datasets that `spec_of` named.

        Raises:
            ConfigError, DataError: as `Steps`.
        """
        data, train = _sections(spec)
        self._steps = Steps(data, train, vocab_size=spec["vocab_size"], dp=spec["dp"])
        self._reader = RowReader(self._steps, seq_len=data.seq_len, vocab_size=spec["vocab_size"])
        self._num_steps = 0
        self._largest_bytes = 0
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
        used, largest = self._reader.bytes_used, self._largest_bytes
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
        self._reader.close()

    def _read(self, step: Step, ranks: Sequence[Reading], label: str, state: Mapping[str, Any] | None) -> PreparedStep:
        places = sorted({rank.place for rank in ranks})
        with_tokens = sorted({rank.place for rank in ranks if rank.wants_tokens})
        wanted = _sequences(step, with_tokens)
        num_bytes = sum(_num_values(part) for place in with_tokens for part in step.plan.ranks[place]) * _VALUE_BYTES
        self._check_memory(num_bytes)
        rows = self._reader.read(step, wanted)
        rows |= self._reader.outline(step, _sequences(step, places) - wanted)
        segment, offsets = None, {}
        if num_bytes:
            segment = Segment.create(label, num_bytes)
            try:
                memory = segment.map(writable=True)
                offsets = _fill(memory, step, with_tokens, rows)
                memory.close()
                segment.seal()
            except BaseException:
                segment.close()
                raise
        self._num_steps += 1
        self._largest_bytes = max(self._largest_bytes, num_bytes)
        parts = {place: [part_of(part, rows).to_json() for part in step.plan.ranks[place]] for place in places}
        return PreparedStep(parts, offsets, segment, state)

    def _check_memory(self, num_bytes: int) -> None:
        """Refuse at the first step what would end the job by the kernel's hand later."""
        if self._is_checked:
            return
        self._is_checked = True
        check_memory(num_bytes, available_memory_bytes())


def check_memory(step_bytes: int, available_bytes: int | None) -> None:
    """Refuse steps of which several do not fit into memory at once.

    Raises:
        ConfigError: with both sizes.
    """
    at_once = STEPS_AHEAD + 2  # one more that ranks hold, and one that is being filled
    if available_bytes is not None and at_once * step_bytes > available_bytes:
        raise ConfigError(
            f"a step has {step_bytes / 2**20:.0f} MiB of tokens and labels for the ranks of this node, of which up to "
            f"{at_once} are in memory at once, and {available_bytes / 2**20:.0f} MiB are available. Lower "
            "train.global_batch_size, or use more nodes."
        )


def _sequences(step: Step, places: Sequence[int]) -> set[int]:
    return {piece.sequence for place in places for part in step.plan.ranks[place] for piece in part.sequences}


def _num_values(part: MicroBatch) -> int:
    return len(part.sequences) * part.sequences[0].length


def _fill(memory: mmap.mmap, step: Step, places: Sequence[int], rows: Mapping[int, Row]) -> dict[int, list[int]]:
    """Copy the places' micro-batches one behind another; gives where each begins, in bytes."""
    offsets: dict[int, list[int]] = {}
    at = 0
    for place in places:
        offsets[place] = []
        for part in step.plan.ranks[place]:
            count = 2 * _num_values(part)
            target = np.frombuffer(memory, np.int32, count, at)
            copy_part(part, rows, target.reshape(2, len(part.sequences), -1))
            offsets[place].append(at)
            at += 4 * count
    return offsets

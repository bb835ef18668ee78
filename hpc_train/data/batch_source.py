"""Where a rank's micro-batches come from: the node agent, or its own reading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from hpc_train.data.loader import Batch, Loader
from hpc_train.data.steps import Step
from hpc_train.plan.batch_pieces import PieceBatch
from hpc_train.plan.batch_table import BatchTable

Batches = list[Batch] | list[PieceBatch]
"""Of rows of equal length, or of sequences that ranks share."""


@final
@dataclass(frozen=True)
class Taken:
    """One rank's part of a step.

    state: the position behind it. digest: of the batch plan, by which ranks know that they have the same one; empty
    where batches are rows.
    """

    batches: Batches
    state: dict[str, Any]
    digest: bytes = b""


@final
@dataclass(frozen=True)
class HeldoutPart:
    """One rank's part of a held-out step. digest: as in `Taken`."""

    batches: Batches
    digest: bytes = b""


class BatchSource(ABC):
    """Gives one rank's micro-batches of each step in order, and the position behind each.

    `step` is called by one thread, the rest by another.
    """

    @property
    @abstractmethod
    def reader(self) -> str:
        """Who reads, in words."""

    @property
    @abstractmethod
    def has_heldout(self) -> bool:
        """Whether there are held-out rows."""

    @abstractmethod
    def first_state(self) -> dict[str, Any]:
        """The position before any step, as JSON."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Begin behind a saved position, before any step; gives what changed in the blend since.

        Raises:
            CheckpointError: the blend changed and data.allow_changed_blend is false.
        """

    @abstractmethod
    def step(self, number: int) -> Taken:
        """Wait for the next step, which has this number.

        Raises:
            DataError: a token id is not below vocab_size, or a file was replaced.
            AgentGone: the node agent has ended.
        """

    @abstractmethod
    def begin_evaluation(self) -> None:
        """The held-out rows are given from the first one on."""

    @abstractmethod
    def heldout_step(self, number: int) -> HeldoutPart | None:
        """The evaluation's next step, from 0; None behind the last. Raises as `step`."""

    @abstractmethod
    def close(self) -> None:
        """End it, also while another thread waits for a step."""


@final
class OwnBatches(BatchSource):
    """A rank that reads by itself."""

    def __init__(self, loader: Loader, dp_rank: int) -> None:
        self._loader, self._dp_rank = loader, dp_rank
        self._heldout: Iterator[Step] = iter(())

    @property
    def reader(self) -> str:
        return "this rank itself"

    @property
    def has_heldout(self) -> bool:
        return self._loader.has_heldout

    def first_state(self) -> dict[str, Any]:
        return self._loader.state()

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        return self._loader.restore(state)

    def step(self, number: int) -> Taken:
        step = self._loader.next_step(number)
        return Taken(self._batches(step), self._loader.state(), _digest(step))

    def begin_evaluation(self) -> None:
        self._heldout = self._loader.heldout_steps()

    def heldout_step(self, number: int) -> HeldoutPart | None:
        step = next(self._heldout, None)
        return None if step is None else HeldoutPart(self._batches(step), _digest(step))

    def _batches(self, step: Step) -> Batches:
        if isinstance(step.plan, BatchTable):
            return self._loader.piece_batches(step, self._dp_rank)
        return list(self._loader.micro_batches(step, self._dp_rank))

    def close(self) -> None:
        pass


def _digest(step: Step) -> bytes:
    return step.plan.digest if isinstance(step.plan, BatchTable) else b""

"""What each step trains on: the rows that the blend gives it, and the plan of who gets which part of them.

Whoever holds the same datasets and configuration gets the same steps, so nobody needs to be told what comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from hpc_train.data.blend import Blend, RowRef
from hpc_train.data.datasets import OpenSource, Sources, open_sources
from hpc_train.data.packing import Packing
from hpc_train.errors import DataError
from hpc_train.plan.batch import BatchPlan, check_batch_sizes, plan_batch_static
from hpc_train.plan.batch_table import BatchTable

if TYPE_CHECKING:
    from hpc_train.config import Config, DataConfig, TrainConfig
    from hpc_train.plan.batch_setup import BatchSetup

# The same held-out rows whatever the seed of the run.
_HELDOUT_SEED = 0


@final
@dataclass(frozen=True)
class Step:
    """What one step trains on: the plan, and the rows that its sequence numbers mean.

    Rows past the end are padding. The plan is a table where rows are whole documents, which ranks may share.
    """

    plan: BatchPlan | BatchTable
    rows: tuple[RowRef, ...]
    heldout: bool = False


@final
class Steps:
    """Gives each step's plan and rows, and the position between them."""

    def __init__(
        self,
        data: DataConfig,
        train: TrainConfig,
        *,
        vocab_size: int,
        dp: int,
        sources: Sources | None = None,
        batches: BatchSetup | None = None,
    ) -> None:
        """Open the sources, unless they are given, and make the blend.

        batches: Plans the steps of hybrid data parallelism, whose rows are whole documents. None: rows of equal length.

        Raises:
            ConfigError: global_batch_size does not divide.
            DataError: as `open_sources`; a source has no tokens, or none has a token that follows another one.
        """
        if batches is None:
            check_batch_sizes(train.global_batch_size, train.micro_batch_size, dp)
        self._data, self._train, self._dp, self._batches = data, train, dp, batches
        self.sources = open_sources(data, vocab_size) if sources is None else sources
        is_packed = batches is None
        packings = _pack(self.sources.train, data, train.seed, is_packed)
        _check_has_labels(packings, data)
        self.blend = _blend(self.sources.train, packings)
        self.heldout_packings = _pack(self.sources.heldout, data, _HELDOUT_SEED, is_packed)

    @property
    def has_heldout(self) -> bool:
        return bool(self.sources.heldout)

    def next_step(self, step: int) -> Step:
        """Take the rows of the next step and plan them; `state` then stands after them."""
        if self._batches is not None:
            documents, lengths = self.blend.take_tokens(_step_tokens(self._data, self._train))
            return Step(self._batches.plan(step, lengths), tuple(documents))
        rows = self.blend.take(self._train.global_batch_size)
        plan = plan_batch_static(step, len(rows), self._data.seq_len, self._train.micro_batch_size, self._dp)
        return Step(plan, tuple(rows))

    def heldout_steps(self, num_steps: int | None = None) -> Iterator[Step]:
        """Give the held-out rows, as many as a step has at a time, each row once at most.

        The rows are the same at every call, for every dp and every seed; padding rows fill the last places where rows
        are of equal length.

        Args:
            num_steps: So many at most. None: train.eval_batches.
        """
        if not self.has_heldout:
            return
        size = self._train.global_batch_size
        count = self._train.eval_batches if num_steps is None else num_steps
        blend = _blend(self.sources.heldout, self.heldout_packings, epochs=1)
        if self._batches is not None:
            for number in range(count):
                documents, lengths = blend.take_tokens(_step_tokens(self._data, self._train))
                if not documents:
                    return
                yield Step(self._batches.plan(number, lengths), tuple(documents), heldout=True)
            return
        rows = blend.take(size * count)
        unit = self._dp * self._train.micro_batch_size
        for number, first in enumerate(range(0, len(rows), size)):
            some = tuple(rows[first : first + size])
            padded = -(-len(some) // unit) * unit
            plan = plan_batch_static(number, padded, self._data.seq_len, self._train.micro_batch_size, self._dp)
            yield Step(plan, some, heldout=True)

    def state(self) -> dict[str, Any]:
        """Give the position after the last step taken, as JSON; the same on every rank."""
        return self.blend.state()

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Go to a saved position; give what changed in the blend since, where the configuration allows it.

        Raises:
            CheckpointError: the blend changed and data.allow_changed_blend is false.
        """
        return self.blend.restore(state, self._data.allow_changed_blend)


def lengths_of_step(config: Config, number: int, tell: Callable[[int], None] = lambda step: None) -> list[int]:
    """Tokens of each sequence of a step of hybrid data parallelism, the first step being 1.

    The datasets' indices alone say it, and those of earlier steps how far these went. tell: called with each of them.

    Raises:
        DataError: as `open_sources`; a source has no tokens, or none has a token that follows another one.
    """
    data, train = config.data, config.train
    sources = open_sources(data, config.model.vocab_size, by_index=True).train
    packings = _pack(sources, data, train.seed, is_packed=False)
    _check_has_labels(packings, data)
    blend = _blend(sources, packings)
    lengths: list[int] = []
    for step in range(1, number + 1):
        tell(step)
        _, lengths = blend.take_tokens(_step_tokens(data, train))
    return lengths


def _step_tokens(data: DataConfig, train: TrainConfig) -> int:
    """The most that a step of whole documents has."""
    return train.global_batch_size * data.seq_len


def _pack(sources: Sequence[OpenSource], data: DataConfig, seed: int, is_packed: bool) -> list[Packing]:
    return [
        Packing(
            source.lengths,
            data.seq_len,
            data.long_documents,
            is_packed=is_packed,
            seed=seed,
            source_index=number,
            first_document=source.first_document,
            name=source.tokens.prefix,
        )
        for number, source in enumerate(sources)
    ]


def _check_has_labels(packings: Sequence[Packing], data: DataConfig) -> None:
    if not any(packing.has_labels for packing in packings):
        raise DataError(
            f"there is nothing to learn from: no document that data.seq_len={data.seq_len} with "
            f"data.long_documents={data.long_documents} leaves has a token that follows another one. Give a larger "
            "data.seq_len, or longer documents."
        )


def _blend(sources: Sequence[OpenSource], packings: Sequence[Packing], epochs: int | None = None) -> Blend:
    weights = [source.weight for source in sources]
    return Blend(packings, weights, [source.identity() for source in sources], epochs=epochs)

"""What each step trains on: the rows that the blend gives it, and the plan of who gets which part of them.

Whoever holds the same datasets and configuration gets the same steps, so nobody needs to be told what comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from hpc_train.data.blend import Blend, RowRef
from hpc_train.data.datasets import OpenSource, Sources, open_sources
from hpc_train.data.packing import Packing
from hpc_train.plan.batch import BatchPlan, check_batch_sizes, plan_batch_static

if TYPE_CHECKING:
    from hpc_train.config import DataConfig, TrainConfig

# The same held-out rows whatever the seed of the run.
_HELDOUT_SEED = 0


@final
@dataclass(frozen=True)
class Step:
    """What one step trains on: the plan, and the rows that its sequence numbers mean. Rows past the end are
    padding."""

    plan: BatchPlan
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
    ) -> None:
        """Open the sources, unless they are given, and make the blend.

        Raises:
            ConfigError: global_batch_size does not divide.
            DataError: as `open_sources`; a source has no tokens.
        """
        check_batch_sizes(train.global_batch_size, train.micro_batch_size, dp)
        self._data, self._train, self._dp = data, train, dp
        self.sources = open_sources(data, vocab_size) if sources is None else sources
        self.blend = self._blend(self.sources.train, self._pack(self.sources.train, train.seed))
        self.heldout_packings = self._pack(self.sources.heldout, _HELDOUT_SEED)

    @property
    def has_heldout(self) -> bool:
        return bool(self.sources.heldout)

    def next_step(self, step: int) -> Step:
        """Take the rows of the next step and plan them; `state` then stands after them."""
        rows = self.blend.take(self._train.global_batch_size)
        plan = plan_batch_static(step, len(rows), self._data.seq_len, self._train.micro_batch_size, self._dp)
        return Step(plan, tuple(rows))

    def heldout_steps(self, num_steps: int | None = None) -> Iterator[Step]:
        """Give the held-out rows, global_batch_size at a time, each row once at most.

        The rows are the same at every call, for every dp and every seed; padding rows fill the last places.

        Args:
            num_steps: So many at most. None: train.eval_batches.
        """
        if not self.has_heldout:
            return
        size = self._train.global_batch_size
        wanted = size * (self._train.eval_batches if num_steps is None else num_steps)
        rows = self._blend(self.sources.heldout, self.heldout_packings, epochs=1).take(wanted)
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

    def _pack(self, sources: Sequence[OpenSource], seed: int) -> list[Packing]:
        return [
            Packing(
                source.lengths,
                self._data.seq_len,
                self._data.long_documents,
                seed=seed,
                source_index=number,
                first_document=source.first_document,
                name=source.tokens.prefix,
            )
            for number, source in enumerate(sources)
        ]

    def _blend(self, sources: Sequence[OpenSource], packings: Sequence[Packing], epochs: int | None = None) -> Blend:
        weights = [source.weight for source in sources]
        return Blend(packings, weights, [source.identity() for source in sources], epochs=epochs)

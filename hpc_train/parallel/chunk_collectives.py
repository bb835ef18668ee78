"""What carries out a list's all-gathers and reduce-scatters, of one rank's model_chunks, beside its other actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hpc_train.comm.groups import Groups
from hpc_train.parallel.data import ShardedParameters
from hpc_train.parallel.replicated import has_tied, sum_over_tp, sum_tied
from hpc_train.plan.schedule import Action, Op


class ChunkCollectives:
    """Gathers of parameters and sums of gradients as actions.

    actors: for `Pipeline.run`. overlap: false to await each collective where it is begun, which changes no value.
    update: updates this rank's shard of a model_chunk, for lists with early updates; None where there are none.
    """

    def __init__(
        self,
        chunks: Sequence[ShardedParameters],
        groups: Groups,
        *,
        overlap: bool,
        update: Callable[[int], None] | None = None,
    ) -> None:
        self._update = update
        self._chunks = tuple(chunks)
        self._groups = groups
        self._overlap = overlap
        self._is_tied_summed = False
        self.actors: Mapping[Op, Callable[[Action], None]] = {
            Op.ALL_GATHER: self._gather,
            Op.REDUCE_SCATTER: self._reduce,
            **({} if update is None else {Op.UPDATE: self._update_early}),
        }

    def begin_step(self) -> None:
        """Begin the gather that every list has first, so that it runs beside what is done before the list is known."""
        self._is_tied_summed = False
        if self._overlap:
            self._chunks[0].begin_gather()

    def publish(self, model_chunk: int) -> None:
        """Have the updated shard of a model_chunk where forwards find it, on all ranks in time."""
        self._chunks[model_chunk].publish_shard()
        if self._overlap:
            self._chunks[model_chunk].begin_gather()

    def await_parameters(self, model_chunk: int) -> None:
        self._chunks[model_chunk].await_parameters()

    def _gather(self, action: Action) -> None:
        chunk = self._chunks[action.model_chunk]
        chunk.begin_gather()
        if not self._overlap:
            chunk.await_parameters()

    def _reduce(self, action: Action) -> None:
        """Sum what several ranks hold, then begin the sum over the dp group. The list has the sum of each chunk with
        tied embeddings behind the last backward of both.
        """
        chunk = self._chunks[action.model_chunk]
        sum_over_tp(chunk, self._groups)
        if has_tied(chunk) and not self._is_tied_summed:
            sum_tied(self._chunks, self._groups)
            self._is_tied_summed = True
        chunk.begin_reduce()
        if not self._overlap:
            chunk.await_gradients()

    def _update_early(self, action: Action) -> None:
        """Update the shard when its sum is there, and begin the gather for the next step."""
        assert self._update is not None
        self._update(action.model_chunk)
        self.publish(action.model_chunk)

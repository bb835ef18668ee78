"""Updates of model_chunks in the backward, ahead of the norm of all gradients, and how they are taken back.

1. the number of supervised tokens is summed over all ranks beside the first forwards: what gradients are divided by
2. a chunk whose gradients' sum is there is updated as if nothing were clipped; what it was before is kept
3. when the norm of all gradients is known, the updates stand; or, where it is clipped or not finite, they are taken
   back, bit for bit, and the step is finished as one without them

Source: Qi et al., "Zero bubble pipeline parallelism", ICLR'24, section 4 (post-validation of the optimizer's step);
here on shards, so that the gathers behind the updates run beside backwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpc_train.comm.begin import Pending, begin_all_reduce
from hpc_train.comm.collectives import Group
from hpc_train.parallel.data import ShardedParameters
from hpc_train.train.optimizer import ShardedAdamW, piece_norms

NORM_MARGIN = 0.8
"""Of the norm that is clipped: below it in one step, updates are made early in the next one (assumed: norms of steps
in a row differ by less as a rule; a wrong guess costs gathers and copies, and changes no value)."""


class EarlyUpdates:
    """This rank's early updates of one step after the other."""

    def __init__(
        self, chunks: Sequence[ShardedParameters], optimizer: ShardedAdamW, clip_grad_norm: float | None, world: Group
    ) -> None:
        self._chunks, self._optimizer, self._world = chunks, optimizer, world
        self._clip_grad_norm = clip_grad_norm
        self._last_norm: float | None = None
        self._lr = 0.0
        self._counted = Pending()
        self._num_supervised = torch.zeros(1, dtype=torch.float64, device=chunks[0].gradients.device)
        self._kept: dict[int, list[torch.Tensor]] = {}
        self.norms: dict[int, list[torch.Tensor]] = {}

    @property
    def is_due(self) -> bool:
        """Whether the step that begins should have early updates; the same on all ranks."""
        if self._last_norm is None:
            return False
        return self._clip_grad_norm is None or self._last_norm <= NORM_MARGIN * self._clip_grad_norm

    def begin_step(self, lr: float, num_supervised: float) -> None:
        """Begin to count. Collective over all ranks. num_supervised: tokens that this rank counts."""
        self._lr = lr
        self._num_supervised.fill_(num_supervised)
        self._counted = begin_all_reduce(self._num_supervised, self._world)

    @torch.no_grad()
    def update(self, model_chunk: int) -> None:
        """Update the chunk's shard when its gradients are there."""
        chunk = self._chunks[model_chunk]
        chunk.await_gradients()
        self._counted.wait()
        with self._world.recorder.segment("optimizer", model_chunk=model_chunk):
            self.norms[model_chunk] = piece_norms(chunk)
            self._keep(model_chunk)
            # A tensor, since a number from a GPU would have to be waited for; the same factor to the bit.
            chunk.gradient_shard.mul_(self._num_supervised.reciprocal().squeeze())
            self._optimizer.update_ahead(model_chunk, self._lr)

    def settle(self, grad_norm: float | None) -> tuple[int, ...]:
        """Say what became of the step's gradients, and get the chunks whose updates stand.

        Updates that do not stand are taken back: weights, moments and gradients are what they were.

        grad_norm: of the mean gradient, or None where the step is skipped.
        """
        self._counted.wait()  # a stage may have no chunk to update early
        self._last_norm = grad_norm
        updated = tuple(self.norms)
        self.norms.clear()
        if grad_norm is not None and (self._clip_grad_norm is None or grad_norm <= self._clip_grad_norm):
            return updated
        for model_chunk in updated:
            self._take_back(model_chunk)
        return ()

    def _state(self, model_chunk: int) -> list[torch.Tensor]:
        chunk = self._chunks[model_chunk]
        moments = [of_chunks[model_chunk] for of_chunks in self._optimizer.moments.values()]
        return [chunk.master_shard, chunk.gradient_shard, *moments]

    def _keep(self, model_chunk: int) -> None:
        state = self._state(model_chunk)
        if model_chunk not in self._kept:
            self._kept[model_chunk] = [torch.empty_like(part) for part in state]
        for kept, part in zip(self._kept[model_chunk], state, strict=True):
            kept.copy_(part)

    @torch.no_grad()
    def _take_back(self, model_chunk: int) -> None:
        chunk = self._chunks[model_chunk]
        chunk.end_gather()  # it sends from the shard
        for kept, part in zip(self._kept[model_chunk], self._state(model_chunk), strict=True):
            part.copy_(kept)
        chunk.publish_shard()

"""What updates this rank's shards: the base of all optimizers, AdamW, and the learning rate of a step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import torch

from hpc_train.config import OptimizerConfig
from hpc_train.parallel.data import ShardedParameters

NORM_PIECE = 1 << 14
"""Elements whose squares are added in fp32 (derived: rounding errors of 16384 terms in 8 lanes stay near 1e-6)."""


def learning_rate(step: int, config: OptimizerConfig, num_steps: int) -> float:
    """The rate of step 1, 2, ...: linear warm-up to `lr`, then half a cosine down to `min_lr`.

    The cosine ends at `decay_steps`, or at the last step; beyond it the rate stays at `min_lr`.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    last = config.decay_steps or num_steps
    if step >= last:
        return config.min_lr if last > config.warmup_steps else config.lr
    progress = (step - config.warmup_steps) / (last - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


def piece_norms(chunk: ShardedParameters) -> list[torch.Tensor]:
    """Norms, in the gradients' type, of pieces of what this rank counts of a model_chunk's gradients."""
    pieces = [
        piece for start, stop in chunk.counted_ranges() for piece in chunk.gradients[start:stop].split(NORM_PIECE)
    ]
    return list(torch._foreach_norm(pieces)) if pieces else []


class ShardedOptimizer(ABC):
    """Updates this rank's shards; its moments exist for those only.

    moments: by name ("exp_avg", "exp_avg_sq"), of each model_chunk, (shard,), fp32; every optimizer has the same, so a
    checkpoint may be gone on with by another one. num_updates: steps taken, which the bias correction depends on.
    """

    def __init__(self, chunks: Sequence[ShardedParameters], config: OptimizerConfig) -> None:
        """chunks: the parameters of each model_chunk."""
        self.moments = {
            name: tuple(torch.zeros_like(chunk.master_shard) for chunk in chunks) for name in ("exp_avg", "exp_avg_sq")
        }
        self.num_updates = 0
        self._config = config

    @abstractmethod
    def step(self, lr: float, updated: Collection[int], then: Callable[[int], None]) -> None:
        """Update the master shards from the gradient shards, which must hold the final, scaled gradients.

        Args:
            updated: Model_chunks that have this step's update already.
            then: Called with each other one, in the order of forwards, as soon as its shard is updated.
        """


class ShardedAdamW(ShardedOptimizer):
    """AdamW; weight decay on parameters with two and more dims.

    Calls torch's fused kernel itself: creating a torch.optim.AdamW imports torch._dynamo, which takes 2.4 s and
    817 modules at each start (measured with torch 2.13). A test holds the two against each other.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR'19.
    """

    def __init__(self, chunks: Sequence[ShardedParameters], config: OptimizerConfig) -> None:
        super().__init__(chunks, config)
        self._counter = torch.zeros((), dtype=torch.float32, device=chunks[0].master_shard.device)
        self._ranges: list[list[tuple[float, list[torch.Tensor]]]] = []
        for chunk, *moments in zip(chunks, *self.moments.values(), strict=True):
            flat = (chunk.master_shard, chunk.gradient_shard, *moments)
            split = chunk.num_decayed_in_shard()
            parts = ((0, split, config.weight_decay), (split, len(flat[0]), 0.0))
            self._ranges.append(
                [(decay, [part[start:stop] for part in flat]) for start, stop, decay in parts if start < stop]
            )

    def step(self, lr: float, updated: Collection[int], then: Callable[[int], None]) -> None:
        for index in range(len(self._ranges)):
            if index not in updated:
                self.update_ahead(index, lr)
                then(index)
        self.num_updates += 1

    @torch.no_grad()
    def update_ahead(self, model_chunk: int, lr: float) -> None:
        """This model_chunk's part of the next `step`, which must be told that it is done."""
        config = self._config
        self._counter.fill_(self.num_updates + 1)
        for weight_decay, (master, gradient, exp_avg, exp_avg_sq) in self._ranges[model_chunk]:
            torch._fused_adamw_(
                [master],
                [gradient],
                [exp_avg],
                [exp_avg_sq],
                [],
                [self._counter],
                lr=lr,
                beta1=config.beta1,
                beta2=config.beta2,
                weight_decay=weight_decay,
                eps=config.eps,
                amsgrad=False,
                maximize=False,
            )

"""AdamW on this rank's shard, and the learning rate of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hpc_train.config import OptimizerConfig
from hpc_train.parallel.data import ShardedParameters


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


class ShardedAdamW:
    """AdamW whose moments exist for this rank's shards only; weight decay on parameters with two and more dims.

    moments: by name ("exp_avg", "exp_avg_sq"), of each model_chunk, (shard,), fp32. num_updates: steps taken, which the
    bias correction depends on.

    Calls torch's fused kernel itself: creating a torch.optim.AdamW imports torch._dynamo, which takes 2.4 s and
    817 modules at each start (measured with torch 2.13). A test holds the two against each other.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR'19.
    """

    def __init__(self, chunks: Sequence[ShardedParameters], config: OptimizerConfig) -> None:
        """chunks: the parameters of each model_chunk."""
        self.moments = {
            name: tuple(torch.zeros_like(chunk.master_shard) for chunk in chunks) for name in ("exp_avg", "exp_avg_sq")
        }
        self._config = config
        self._counter = torch.zeros((), dtype=torch.float32, device=chunks[0].master_shard.device)
        self._ranges: list[tuple[float, list[torch.Tensor]]] = []
        for chunk, *moments in zip(chunks, *self.moments.values(), strict=True):
            flat = (chunk.master_shard, chunk.gradient_shard, *moments)
            split = chunk.num_decayed_in_shard()
            for start, stop, decay in ((0, split, config.weight_decay), (split, len(flat[0]), 0.0)):
                if start < stop:
                    self._ranges.append((decay, [part[start:stop] for part in flat]))

    @property
    def num_updates(self) -> int:
        return int(self._counter)

    @num_updates.setter
    def num_updates(self, value: int) -> None:
        self._counter.fill_(value)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the master shards from the gradient shards, which must hold the final, scaled gradients."""
        config = self._config
        self._counter += 1
        for weight_decay, (master, gradient, exp_avg, exp_avg_sq) in self._ranges:
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

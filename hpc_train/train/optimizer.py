"""AdamW on this rank's shard, and the learning rate of a step."""

from __future__ import annotations

import math

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
    """AdamW whose moments exist for this rank's shard only; weight decay on parameters with two and more dims.

    moments: by name ("exp_avg", "exp_avg_sq"), each (shard,), fp32. num_updates: steps taken, which the bias
    correction depends on.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR'19; torch's fused kernel.
    """

    def __init__(self, parameters: ShardedParameters, config: OptimizerConfig) -> None:
        master = parameters.master_shard
        self.moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        self._parameters = parameters
        self._counters: list[torch.Tensor] = []
        split = parameters.num_decayed_in_shard()
        groups = []
        for start, stop, decay in ((0, split, config.weight_decay), (split, master.numel(), 0.0)):
            if start < stop:
                groups.append({"params": [torch.nn.Parameter(master[start:stop])], "weight_decay": decay})
        self._optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
        start = 0
        for group in self._optimizer.param_groups:
            (parameter,) = group["params"]
            stop = start + parameter.numel()
            counter = torch.zeros((), dtype=torch.float32, device=master.device)
            self._counters.append(counter)
            self._optimizer.state[parameter] = {
                "step": counter,
                **{name: moment[start:stop] for name, moment in self.moments.items()},
            }
            parameter.grad = parameters.gradient_shard[start:stop]
            start = stop

    @property
    def num_updates(self) -> int:
        return int(self._counters[0]) if self._counters else 0

    @num_updates.setter
    def num_updates(self, value: int) -> None:
        for counter in self._counters:
            counter.fill_(value)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the master shard from the gradient shard, which must hold the final, scaled gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

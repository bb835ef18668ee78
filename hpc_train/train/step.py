"""One optimizer update: micro-batches, gradient sum, norm, clipping, update.

1. forward and backward of this rank's micro-batches, gradients added in fp32
2. reduce-scatter of the gradients
3. one sum over ranks of (loss, supervised tokens, squared norm, wishes to stop): from here all ranks know the same
4. if they are finite: scale by tokens and clip, update, all-gather of the parameters; else skip, on all alike
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hpc_train.comm.collectives import all_reduce_sum
from hpc_train.models.transformer import AttentionPlan, Transformer
from hpc_train.parallel.data import ShardedParameters
from hpc_train.train.optimizer import ShardedAdamW

if TYPE_CHECKING:
    from hpc_train.data.loader import Batch

# Elements whose squares are added in fp32 (derived: rounding errors of 16384 terms in 8 lanes stay near 1e-6).
_NORM_PIECE = 1 << 14


@dataclass(frozen=True)
class StepResult:
    """Figures of one step over all ranks. loss: nats per supervised token; grad_norm: of the mean gradient.

    stop_wanted: some rank wants the run to stop after this step.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    num_supervised: int
    skipped: bool
    stop_wanted: bool = False


def _never() -> bool:
    return False


@dataclass
class Trainer:
    """The parts of a training state that a step changes."""

    model: Transformer
    parameters: ShardedParameters
    optimizer: ShardedAdamW
    clip_grad_norm: float | None
    device: torch.device

    def step(self, micro_batches: Iterable[Batch], lr: float, stop_wanted: Callable[[], bool] = _never) -> StepResult:
        """Collective over the data-parallel group. stop_wanted is asked once, late in the step."""
        self.parameters.zero_gradients()
        loss_sum, num_tokens, num_supervised = self._accumulate(micro_batches)
        shard = self.parameters.reduce_gradients()
        square = _sum_of_squares(shard)
        loss_sum, tokens, supervised, square, wishes = all_reduce_sum(
            [loss_sum, num_tokens, num_supervised, square, int(stop_wanted())], self.parameters.group, self.device
        )
        skipped = not (math.isfinite(loss_sum) and math.isfinite(square) and supervised > 0)
        grad_norm = math.sqrt(square) / supervised if supervised else 0.0
        if not skipped:
            shard.mul_(self._gradient_scale(grad_norm) / supervised)
            self.optimizer.step(lr)
            self.parameters.publish_parameters()
        loss = loss_sum / supervised if supervised else 0.0
        return StepResult(loss, grad_norm, int(tokens), int(supervised), skipped, wishes > 0)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over the batches of all ranks, in nats per supervised token. Collective."""
        loss_sum, num_supervised = 0.0, 0
        for batch in batches:
            loss_sum += float(self._loss_sum(batch))
            num_supervised += batch.num_supervised
        loss_sum, supervised = all_reduce_sum([loss_sum, num_supervised], self.parameters.group, self.device)
        return loss_sum / supervised if supervised else math.nan

    def _accumulate(self, micro_batches: Iterable[Batch]) -> tuple[float, int, int]:
        losses = []
        num_tokens = num_supervised = 0
        for batch in micro_batches:
            loss = self._loss_sum(batch)
            loss.backward()
            losses.append(loss.detach())
            num_tokens += batch.num_tokens
            num_supervised += batch.num_supervised
        return math.fsum(float(loss) for loss in losses), num_tokens, num_supervised

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        plan = AttentionPlan.from_boundaries(batch.boundaries, batch.tokens.shape[1], self.device)
        return self.model.loss_sum(
            batch.tokens.to(self.device), batch.labels.to(self.device), batch.positions.to(self.device), plan
        )

    def _gradient_scale(self, grad_norm: float) -> float:
        if self.clip_grad_norm is None or grad_norm <= self.clip_grad_norm:
            return 1.0
        return self.clip_grad_norm / grad_norm


def _sum_of_squares(values: torch.Tensor) -> float:
    """Norms of pieces in fp32, added in double: as exact as double throughout to 1e-7, without its conversion."""
    norms = torch._foreach_norm(list(values.split(_NORM_PIECE)))
    return float(torch.stack(norms).double().square().sum())

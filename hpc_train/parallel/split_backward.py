"""The backward in two: gradients of inputs at once, those of linears' weights when the schedule has a W for them.

A linear whose weight is queued gives its input's gradient in the backward pass and leaves its input and its output's
gradient in a queue; a W multiplies them and adds the product to the flat gradients. Autograd goes through a
micro-batch once and keeps nothing of it. A block that is recomputed is so before its linears' backwards, which queue
what was recomputed.

Source: Qi et al., "Zero bubble pipeline parallelism", ICLR'24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class _Product:
    """A weight's gradient that is still to be made: output_gradient^T input."""

    weight: str
    bias: str | None
    x: torch.Tensor
    output_gradient: torch.Tensor


@dataclass
class WeightQueue:
    """What the linears of one model_chunk have left to do for their weights.

    gradient_of: where the gradients of a parameter are summed, by its name in the model.
    """

    gradient_of: Callable[[str], torch.Tensor]
    _products: list[_Product] = field(default_factory=list)

    def add(self, weight: str, bias: str | None, x: torch.Tensor, output_gradient: torch.Tensor) -> None:
        """Leave a weight's gradient, and a bias's, for later. x: (..., in); output_gradient: (..., out)."""
        self._products.append(_Product(weight, bias, x, output_gradient))

    def take(self) -> Callable[[], None]:
        """What adds the gradients that were left since the last call; it frees their tensors one by one."""
        products, self._products = self._products, []
        return lambda: self._add(products)

    @torch.no_grad()
    def _add(self, products: list[_Product]) -> None:
        while products:
            product = products.pop(0)
            x_Nf, gradient_No = product.x.flatten(0, -2), product.output_gradient.flatten(0, -2)
            weight_of = self.gradient_of(product.weight)
            if weight_of.dtype == x_Nf.dtype:
                weight_of.addmm_(gradient_No.t(), x_Nf)
            else:
                weight_of.add_(gradient_No.t() @ x_Nf)
            if product.bias is not None:
                self.gradient_of(product.bias).add_(gradient_No.sum(dim=0))


@dataclass(frozen=True)
class QueuedWeight:
    """Where a linear leaves what its parameters' gradients need, and their names in the model."""

    queue: WeightQueue
    weight: str
    bias: str | None = None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, queued: QueuedWeight | None
) -> torch.Tensor:
    """x weight^T + bias; with `queued`, their gradients are left to its queue."""
    if queued is None or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    return _QueuedLinear.apply(x, weight, bias, queued)


class _QueuedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, queued: QueuedWeight
    ) -> torch.Tensor:
        ctx.queued = queued
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, output_gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        queued = ctx.queued
        queued.queue.add(queued.weight, queued.bias, x.detach(), output_gradient)
        return output_gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None


class QueuedLinear(nn.Module):
    """A linear with the parameters of a plain one, whose gradients are left to a queue."""

    def __init__(self, plain: nn.Linear, queued: QueuedWeight) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self.queued = queued

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, self.queued)


def queue_weights(model: nn.Module, queue: WeightQueue) -> None:
    """Have the linears of a model_chunk leave their weights' gradients to a queue.

    The output head does not: the gradients of its logits are as wide as the vocabulary, and waiting for their W they
    would take more memory than whole backwards do.
    """
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            path = f"{name}.{child_name}" if name else child_name
            if path == "head":
                continue
            if type(child) is nn.Linear:
                bias = None if child.bias is None else f"{path}.bias"
                setattr(module, child_name, QueuedLinear(child, QueuedWeight(queue, f"{path}.weight", bias)))

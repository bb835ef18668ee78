"""A rank's part of the model: by its pipeline stage and its tensor-parallel place, with its first weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hpc_train.config import ModelConfig
from hpc_train.models.transformer import Attention, GptFeedForward, LlamaFeedForward, Transformer, initial_values
from hpc_train.parallel.exchange import Exchange
from hpc_train.parallel.tensor import TensorParallelTransformer
from hpc_train.plan.parameters import LocalParameter, ModelPart, TensorSplit, plan_parameters


def build_part(
    config: ModelConfig, seq_len: int, part: ModelPart, split: TensorSplit, exchange: Exchange, device: torch.device
) -> tuple[Transformer, tuple[LocalParameter, ...]]:
    """The part of the model that a rank holds, its weights unset, and what each of its parameters is a part of.

    Args:
        exchange: Of the tp group.
    """
    held = {"layers": part.layers, "has_embedding": part.has_embedding, "has_head": part.has_head}
    with torch.device("meta"), _WithoutValues():
        if split.tp == 1:
            model = Transformer(config, seq_len, **held)  # type: ignore[arg-type]
        else:
            model = TensorParallelTransformer(config, seq_len, split, exchange, **held)
    plans = plan_parameters(config, seq_len, part, split)
    _check_plans(model, plans)
    _allocate(model, device)
    return model, plans


@torch.no_grad()
def set_initial_weights(model: Transformer, plans: Sequence[LocalParameter], seed: int) -> None:
    """Give each part of a parameter what the whole one would have there, whatever the mesh."""
    parameters = dict(model.named_parameters())
    for plan in plans:
        parameter = parameters[plan.local_name]
        whole = initial_values(model.config, plan.name, plan.shape, seed, parameter.device)
        parts = tuple(slice(low, low + size) for low, size in zip(plan.box.offsets, plan.box.sizes, strict=True))
        parameter.copy_(whole[parts])


def set_recomputation(model: Transformer, recompute: str) -> None:
    """none; selective: attention's core and the activation function; full: whole blocks."""
    model.recompute_blocks = recompute == "full"
    for module in model.modules():
        if isinstance(module, Attention | GptFeedForward | LlamaFeedForward):
            module.recompute_core = recompute == "selective"


class _WithoutValues(TorchFunctionMode):
    """Modules are made without values of their own, since a rank sets others.

    On the meta device a normal draw imports torch._dynamo, hundreds of modules for nothing at each start of a rank
    (measured with torch 2.13; see docs/measurements/main-job.md).
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **kwargs)


def _check_plans(model: nn.Module, plans: Sequence[LocalParameter]) -> None:
    """The plan and the model name the same parameters with the same shapes."""
    planned = {plan.local_name: plan.box.sizes for plan in plans}
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert planned == built, sorted(set(planned.items()) ^ set(built.items()))


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Replace each parameter without storage by one with it; tied ones stay one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                # Not empty_like, which is Python and imports sympy where the parameter is on the meta device.
                made[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device))
            setattr(module, name, made[id(parameter)])

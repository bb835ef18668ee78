"""Sums of gradients of parameters that several ranks of a mesh hold: within a tp group, and of tied embeddings.

Before a chunk's data-parallel reduce-scatter each copy must have the gradient of the whole. Three kinds:

- sequence parallel: norms, row biases and learned positions saw a share of the tokens on each tp rank
- key/value heads that several tp ranks hold, each for its own query heads
- tied embeddings, whose copies on the first and the last stage each got a part
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpc_train.comm.collectives import Group, all_reduce_
from hpc_train.comm.groups import Groups
from hpc_train.parallel.data import ShardedParameters
from hpc_train.plan.groups import TIED
from hpc_train.plan.parameters import LocalParameter


def sum_over_tp(chunk: ShardedParameters, groups: Groups) -> None:
    """Give each copy of a parameter of a model_chunk its gradient from all tp ranks. Collective over the tp group."""
    every = [(plan, chunk.gradient_of(name)) for name, plan in chunk.plans.items()]
    _sum_whole([gradient for plan, gradient in every if plan.tp_sum == "all"], groups.along("tp"))
    _sum_key_values([(plan, gradient) for plan, gradient in every if plan.tp_sum == "kv"], groups.along("tp"))


def has_tied(chunk: ShardedParameters) -> bool:
    """Whether a model_chunk has one of two copies of the embeddings."""
    return any(plan.is_tied for plan in chunk.plans.values())


def sum_tied(chunks: Sequence[ShardedParameters], groups: Groups) -> None:
    """Give both copies of tied embeddings their whole gradient. Collective over the two stages that hold them.

    chunks: this rank's, of which two hold a copy where one stage has the first and the last chunk.
    """
    copies = [chunk.gradient_of(name) for chunk in chunks for name, plan in chunk.plans.items() if plan.is_tied]
    if len(copies) == 2:
        copies[1].copy_(copies[0].add_(copies[1]))
    else:
        _sum_whole(copies, groups.along(TIED))


def _sum_whole(gradients: list[torch.Tensor], group: Group) -> None:
    """One all-reduce over gradients of the same shapes on all ranks of the group."""
    if not gradients or group.group_size == 1:
        return
    flat = all_reduce_(torch.cat([gradient.flatten() for gradient in gradients]), group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view(gradient.shape))


def _sum_key_values(held: list[tuple[LocalParameter, torch.Tensor]], group: Group) -> None:
    """Heads are shared in any pattern, so each rank puts its own in their places of the whole, and takes them back."""
    if not held or group.group_size == 1:
        return
    wholes = [gradient.new_zeros(plan.shape) for plan, gradient in held]
    for (plan, gradient), whole in zip(held, wholes, strict=True):
        whole[plan.box.offsets[0] : plan.box.offsets[0] + plan.box.sizes[0]] = gradient
    flat = all_reduce_(torch.cat([whole.flatten() for whole in wholes]), group)
    for (plan, gradient), part in zip(held, flat.split([whole.numel() for whole in wholes]), strict=True):
        rows = part.view(plan.shape)[plan.box.offsets[0] : plan.box.offsets[0] + plan.box.sizes[0]]
        gradient.copy_(rows)

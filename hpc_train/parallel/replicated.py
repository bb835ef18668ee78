"""Sums of gradients of parameters that several ranks of a mesh hold: within a tp group, and of tied embeddings.

Before the data-parallel reduce-scatter each copy must have the gradient of the whole. Three kinds:

- sequence parallel: norms, row biases and learned positions saw a share of the tokens on each tp rank
- key/value heads that several tp ranks hold, each for its own query heads
- tied embeddings, whose copies on the first and the last stage each got a part
"""

from __future__ import annotations

import torch

from hpc_train.comm.collectives import all_reduce_
from hpc_train.comm.groups import Groups
from hpc_train.parallel.data import ShardedParameters
from hpc_train.plan.groups import TIED
from hpc_train.plan.parameters import LocalParameter


def sum_replicated_gradients(parameters: ShardedParameters, groups: Groups) -> None:
    """Give each copy of a parameter its whole gradient. Collective over the tp group and the tied stages."""
    plans = parameters.plans.values()
    _sum_whole(parameters, [plan for plan in plans if plan.tp_sum == "all"], groups, "tp")
    _sum_key_values(parameters, [plan for plan in plans if plan.tp_sum == "kv"], groups)
    _sum_whole(parameters, [plan for plan in plans if plan.is_tied], groups, TIED)


def _sum_whole(parameters: ShardedParameters, plans: list[LocalParameter], groups: Groups, name: str) -> None:
    """One all-reduce over gradients of the same shapes on all ranks of the group."""
    if not plans or groups.along(name).group_size == 1:
        return
    gradients = [parameters.gradient_of(plan.local_name) for plan in plans]
    flat = all_reduce_(torch.cat([gradient.flatten() for gradient in gradients]), groups.along(name))
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view(gradient.shape))


def _sum_key_values(parameters: ShardedParameters, plans: list[LocalParameter], groups: Groups) -> None:
    """Heads are shared in any pattern, so each rank puts its own in their places of the whole, and takes them back."""
    group = groups.along("tp")
    if not plans or group.group_size == 1:
        return
    gradients = [parameters.gradient_of(plan.local_name) for plan in plans]
    wholes = [gradient.new_zeros(plan.shape) for plan, gradient in zip(plans, gradients, strict=True)]
    for plan, gradient, whole in zip(plans, gradients, wholes, strict=True):
        whole[plan.box.offsets[0] : plan.box.offsets[0] + plan.box.sizes[0]] = gradient
    flat = all_reduce_(torch.cat([whole.flatten() for whole in wholes]), group)
    for plan, gradient, part in zip(plans, gradients, flat.split([w.numel() for w in wholes]), strict=True):
        rows = part.view(plan.shape)[plan.box.offsets[0] : plan.box.offsets[0] + plan.box.sizes[0]]
        gradient.copy_(rows)

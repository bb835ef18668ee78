"""Data parallel with sharded optimizer state (ZeRO-1) on flat buffers.

Parameters lie one behind the other in one flat buffer and the model's tensors are views of it. Gradients are
summed in fp32 in a second flat buffer. At the end of a step each rank gets its shard of the summed gradients,
updates its shard of the parameters, and the shards are gathered into the buffer that the model sees.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC'20.
"""

from __future__ import annotations

import torch
from torch import nn

from hpc_train.comm.collectives import Group, all_gather_, reduce_scatter_sum_
from hpc_train.plan.flat import FlatLayout, lay_out


class ShardedParameters:
    """A model's parameters and gradients as flat buffers, and this rank's shard of them.

    layout: where each parameter lies; those with two and more dimensions first, so that weight decay needs one
    range of a shard. master_shard: (shard,), fp32, what the optimizer updates: a part of the parameter buffer in
    fp32 training, a copy of its own in bf16.
    """

    layout: FlatLayout
    master_shard: torch.Tensor

    def __init__(self, model: nn.Module, group: Group, dtype: torch.dtype) -> None:
        """Move the model's parameters into the flat buffer, as `dtype`. Every rank must hold equal values."""
        self.group = group
        named = sorted(model.named_parameters(), key=lambda item: item[1].dim() < 2)
        self.layout = lay_out([(name, tuple(p.shape)) for name, p in named], group.group_size)
        device = named[0][1].device
        padded = self.layout.padded_elements
        self.gradients = torch.zeros(padded, dtype=torch.float32, device=device)
        master = torch.zeros(padded, dtype=torch.float32, device=device)
        for place, (_, parameter) in zip(self.layout.parameters, named, strict=True):
            master[place.start : place.stop] = parameter.detach().flatten()
        self.parameters = master if dtype == torch.float32 else master.to(dtype)
        start, stop = self.layout.shard_range(group.group_rank)
        self.master_shard = master[start:stop] if dtype == torch.float32 else master[start:stop].clone()
        self._num_decayed = sum(p.numel() for _, p in named if p.dim() >= 2)
        for place, (_, parameter) in zip(self.layout.parameters, named, strict=True):
            self._attach(parameter, place.start, place.stop)

    @property
    def parameter_shard(self) -> torch.Tensor:
        """This rank's part of the buffer that the model sees: (shard,), the model's type."""
        start, stop = self.layout.shard_range(self.group.group_rank)
        return self.parameters[start:stop]

    @property
    def gradient_shard(self) -> torch.Tensor:
        """This rank's part of the gradients: (shard,), fp32; the sum over ranks after reduce_gradients."""
        start, stop = self.layout.shard_range(self.group.group_rank)
        return self.gradients[start:stop]

    def num_decayed_in_shard(self) -> int:
        """Elements at the head of this shard that belong to parameters with two and more dimensions."""
        start, stop = self.layout.shard_range(self.group.group_rank)
        return min(max(self._num_decayed - start, 0), stop - start)

    def zero_gradients(self) -> None:
        self.gradients.zero_()

    def reduce_gradients(self) -> torch.Tensor:
        """Sum the gradients over the group into this rank's shard, and return it. Collective over the group."""
        return reduce_scatter_sum_(self.gradients, self.group)

    def publish_parameters(self) -> None:
        """Give the updated shards to every rank's model. Collective over the group."""
        if self.parameter_shard.data_ptr() != self.master_shard.data_ptr():
            self.parameter_shard.copy_(self.master_shard)
        all_gather_(self.parameters, self.group)

    def _attach(self, parameter: nn.Parameter, start: int, stop: int) -> None:
        shape = parameter.shape
        parameter.data = self.parameters[start:stop].view(shape)
        gradient = self.gradients[start:stop].view(shape)
        if parameter.dtype == torch.float32:
            parameter.grad = gradient  # autograd adds in place
            return

        def accumulate(tensor: torch.Tensor) -> None:
            if tensor.grad is not None:
                gradient.add_(tensor.grad)
                tensor.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)

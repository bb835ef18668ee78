"""Data parallel with sharded gradient sums and optimizer state (ZeRO-2), on flat buffers of each model_chunk.

The parameters of a model_chunk lie one behind the other in one flat buffer and the model's tensors are views of it.
Gradients of a step's micro-batches are summed in fp32 in a second flat buffer. A step goes like this:

- gather: the shards that the ranks of a dp group updated come together in the buffer that the model sees; it is begun
  early and awaited before the chunk's first forward
- reduce: each rank gets its shard of the gradients' sum over the group; it is begun behind the chunk's last backward
  and awaited before the update
- update: the optimizer changes this rank's shard; the other parts of the buffer are old until the next gather, which
  may be begun in the step of the update, when nothing there uses the chunk's parameters any more

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC'20.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hpc_train.comm.begin import Pending, begin_all_gather, begin_reduce_scatter, room_for_sums
from hpc_train.comm.collectives import Group
from hpc_train.plan.flat import Box, FlatLayout, boxes_of_range, lay_out
from hpc_train.plan.parameters import LocalParameter


@dataclass(frozen=True)
class ShardPiece:
    """A box of a global parameter in this rank's shard, at elements start .. of the flat buffer."""

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int


class ShardedParameters:
    """A model's parameters and gradients as flat buffers, and this rank's shard of them.

    layout: where each of this rank's parameters lies, under its local name; those with two and more dimensions first,
    so that weight decay needs one range of a shard. plans: what each is a part of. master_shard: (shard,), fp32, what
    the optimizer updates: a part of the parameter buffer in fp32 training, a copy of its own in bf16. Parameters of
    fp64, which tests use, have everything in fp64.
    """

    layout: FlatLayout
    master_shard: torch.Tensor

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        dtype: torch.dtype,
        plans: Sequence[LocalParameter] | None = None,
        wire: torch.dtype | None = None,
    ) -> None:
        """Move the model's parameters into the flat buffer, as `dtype`. Every rank of the group must hold equal values.

        plans: None where the model is whole. wire: type in which gradients travel; None for that of their sums.
        """
        self.group = group
        self._wire = wire
        self._is_whole = True
        self._gather: Pending | None = None
        self._reduction: Pending | None = None
        self._room: torch.Tensor | None = None
        named = sorted(model.named_parameters(), key=lambda item: item[1].dim() < 2)
        whole = [LocalParameter(name, name, tuple(p.shape), Box((0,) * p.dim(), tuple(p.shape))) for name, p in named]
        self.plans = {plan.local_name: plan for plan in (whole if plans is None else plans)}
        self.layout = lay_out([(name, tuple(p.shape)) for name, p in named], group.group_size)
        self._places = {place.name: place for place in self.layout.parameters}
        device = named[0][1].device
        padded = self.layout.padded_elements
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        self.gradients = torch.zeros(padded, dtype=exact, device=device)
        master = torch.zeros(padded, dtype=exact, device=device)
        for place, (_, parameter) in zip(self.layout.parameters, named, strict=True):
            master[place.start : place.stop] = parameter.detach().flatten()
        self.parameters = master if dtype == exact else master.to(dtype)
        start, stop = self.layout.shard_range(group.group_rank)
        self.master_shard = master[start:stop] if dtype == exact else master[start:stop].clone()
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
        """This rank's part of the gradients: (shard,), fp32; the sum over ranks after await_gradients."""
        start, stop = self.layout.shard_range(self.group.group_rank)
        return self.gradients[start:stop]

    def gradient_of(self, local_name: str) -> torch.Tensor:
        """This rank's sum of a parameter's gradients, in its local shape."""
        place = self._places[local_name]
        return self.gradients[place.start : place.stop].view(place.shape)

    def num_decayed_in_shard(self) -> int:
        """Elements at the head of this shard that belong to parameters with two and more dimensions."""
        start, stop = self.layout.shard_range(self.group.group_rank)
        return min(max(self._num_decayed - start, 0), stop - start)

    def counted_ranges(self) -> list[tuple[int, int]]:
        """Ranges of the flat buffer within this shard that this rank counts: every parameter is counted once in all."""
        first, last = self.layout.shard_range(self.group.group_rank)
        ranges: list[tuple[int, int]] = []
        for place in self.layout.parameters:
            counted_from = self.plans[place.name].counted_from
            if counted_from is None:
                continue
            start, stop = max(first, place.start + counted_from), min(last, place.stop)
            if start >= stop:
                continue
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return ranges

    def pieces(self, *, counted: bool) -> Iterator[ShardPiece]:
        """This shard as boxes of global parameters; counted: only what this rank counts."""
        first, last = self.layout.shard_range(self.group.group_rank)
        for place in self.layout.parameters:
            plan = self.plans[place.name]
            skipped = plan.counted_from if counted else 0
            if skipped is None:
                continue
            start, stop = max(first, place.start + skipped), min(last, place.stop)
            if start >= stop:
                continue
            at = start
            for box in boxes_of_range(place.shape, start - place.start, stop - place.start):
                offsets = tuple(a + b for a, b in zip(plan.box.offsets, box.offsets, strict=True))
                yield ShardPiece(plan.name, plan.shape, Box(offsets, box.sizes), at)
                at += box.num_elements

    def zero_gradients(self) -> None:
        self.gradients.zero_()
        self._reduction = None

    def begin_reduce(self) -> None:
        """Begin to sum the gradients over the group. Collective over the group."""
        assert self._reduction is None, "one reduce-scatter a step"
        if self._room is None:
            self._room = room_for_sums(self.gradients, self.group, self._wire)
        self._reduction = begin_reduce_scatter(self.gradients, self.group, self._room, self._wire)

    def await_gradients(self) -> torch.Tensor:
        """This rank's shard of the gradients' sum over the group, which was begun before."""
        assert self._reduction is not None, "the sum was not begun"
        self._reduction.wait()
        return self.gradient_shard

    def publish_shard(self) -> None:
        """Have the updated shard in the buffer that the model sees; what other ranks updated comes with a gather.

        A gather that is under way is over first, and does not count.
        """
        self.end_gather()
        if self.parameter_shard.data_ptr() != self.master_shard.data_ptr():
            self.parameter_shard.copy_(self.master_shard)
        self._is_whole = False

    def begin_gather(self) -> None:
        """Begin to get what other ranks updated, unless it is here or on its way. Collective over the group."""
        if not self._is_whole and self._gather is None:
            self._gather = begin_all_gather(self.parameters, self.group)

    def end_gather(self) -> None:
        """Return when no gather is under way. The parameter buffer must not be written to before."""
        if self._gather is not None:
            self._gather.wait()
            self._gather, self._is_whole = None, True

    def await_parameters(self) -> None:
        """Return when the model has all parameters; a gather that is needed must have been begun."""
        self.end_gather()
        assert self._is_whole, "the gather was not begun"

    def _attach(self, parameter: nn.Parameter, start: int, stop: int) -> None:
        shape = parameter.shape
        parameter.data = self.parameters[start:stop].view(shape)
        gradient = self.gradients[start:stop].view(shape)
        if parameter.dtype == gradient.dtype:
            parameter.grad = gradient  # autograd adds in place
            return

        def accumulate(tensor: torch.Tensor) -> None:
            if tensor.grad is not None:
                gradient.add_(tensor.grad)
                tensor.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)

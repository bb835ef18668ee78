"""Execute a stage's list of actions: forwards, backwards, and what travels between stages beside them.

The list is `plan.schedule`'s; nothing here decides an order. A send or a receive is posted where it stands in the
list. A receive is awaited by the forward or backward that needs it, a send at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpc_train.comm.collectives import Group, receive_from, send_to
from hpc_train.errors import ConfigError
from hpc_train.models.transformer import Inputs, Transformer
from hpc_train.plan.schedule import Action, Op, Payload, Schedule, source_of

Key = tuple[Payload, int, int]
"""What is kept or travels: its kind, micro-batch, and the model_chunk that made it or needs it."""


@dataclass
class _Step:
    """What is alive while a list is executed.

    entered: what each forward got from before; left: what it gave. arriving, sending: posted and not yet awaited.
    """

    inputs: Sequence[Inputs]
    losses: list[torch.Tensor | None]
    entered: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    left: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    here: dict[Key, torch.Tensor] = field(default_factory=dict)
    arriving: dict[Key, tuple[Any, torch.Tensor]] = field(default_factory=dict)
    sending: list[tuple[Any, torch.Tensor]] = field(default_factory=list)


class Pipeline:
    """One rank's stage: its model chunks, and the groups over which its neighbours are reached.

    forward_group, backward_group: the pp ranks in the order of stages; activations travel on the first, gradients on
    the second. On NCCL they must be two communicators: operations of one run in the order in which they were posted.
    """

    def __init__(
        self, chunks: Sequence[Transformer], forward_group: Group, backward_group: Group, dtype: torch.dtype
    ) -> None:
        self.chunks = tuple(chunks)
        self.stage = forward_group.group_rank
        self._groups = {Payload.ACTIVATION: forward_group, Payload.GRADIENT: backward_group}
        self._dtype = dtype

    def run(
        self, schedule: Schedule, inputs: Sequence[Inputs], then: Mapping[Op, Callable[[Action], None]] | None = None
    ) -> list[torch.Tensor]:
        """Execute this stage's list. Collective over the pipeline.

        Args:
            inputs: The micro-batches, the same on all stages.
            then: What carries out the actions that are not the pipeline's own.

        Returns:
            The summed loss of each micro-batch, detached; on the last stage only, else an empty list.

        Raises:
            ConfigError: the list has an action that nobody carries out.
        """
        step = _Step(inputs, [None] * len(inputs))
        actors: dict[Op, Callable[[Action], None]] = {
            Op.F: lambda action: self._forward(action, schedule, step),
            Op.B: lambda action: self._backward(action, schedule, step),
            Op.SEND: lambda action: self._send(action, step),
            Op.RECV: lambda action: self._receive(action, step),
            **(then or {}),
        }
        if schedule.splits_backward and Op.W not in actors:
            raise ConfigError("the schedule splits the backward (W actions), which this model's linears cannot do")
        for action in schedule.actions[self.stage]:
            actor = actors.get(action.op)
            if actor is None:
                raise ConfigError(f"the schedule has {action.describe()}, which nothing here carries out")
            actor(action)
        for work, _ in step.sending:
            work.wait()
        return [loss for loss in step.losses if loss is not None]

    def _forward(self, action: Action, schedule: Schedule, step: _Step) -> None:
        micro_batch, own = _place(action)
        inputs, chunk = step.inputs[micro_batch], self.chunks[own]
        entered = None
        if source_of(action, self.stage, schedule.chunks) is not None:
            entered = self._awaited(Payload.ACTIVATION, micro_batch, own, step)
            if torch.is_grad_enabled():
                step.entered[micro_batch, own] = entered.requires_grad_()
        left = chunk.hidden(entered, inputs)
        global_chunk = schedule.chunks[self.stage][own]
        if global_chunk == schedule.num_global_chunks - 1:
            left = chunk.loss(left, inputs.labels_BT)
            step.losses[micro_batch] = left.detach()
        elif schedule.places[global_chunk + 1][0] == self.stage:
            step.here[Payload.ACTIVATION, micro_batch, schedule.places[global_chunk + 1][1]] = left.detach()
        step.left[micro_batch, own] = left

    def _backward(self, action: Action, schedule: Schedule, step: _Step) -> None:
        micro_batch, own = _place(action)
        left = step.left.pop((micro_batch, own))
        gradient = None
        if source_of(action, self.stage, schedule.chunks) is not None:
            gradient = self._awaited(Payload.GRADIENT, micro_batch, own, step)
        torch.autograd.backward(left, gradient)
        entered = step.entered.pop((micro_batch, own), None)
        if entered is None:
            return
        assert entered.grad is not None
        global_chunk = schedule.chunks[self.stage][own]
        peer, there = schedule.places[global_chunk - 1]
        key = (Payload.GRADIENT, micro_batch, there if peer == self.stage else own)
        step.here[key] = entered.grad

    def _send(self, action: Action, step: _Step) -> None:
        micro_batch, own = _place(action)
        assert action.payload is not None and action.peer is not None
        if action.payload is Payload.ACTIVATION:
            tensor = step.left[micro_batch, own].detach()
            if not torch.is_grad_enabled():
                del step.left[micro_batch, own]
        else:
            tensor = step.here.pop((Payload.GRADIENT, micro_batch, own))
        tensor = tensor.contiguous()
        step.sending.append((send_to(tensor, action.peer, self._groups[action.payload]), tensor))

    def _receive(self, action: Action, step: _Step) -> None:
        micro_batch, own = _place(action)
        assert action.payload is not None and action.peer is not None
        tensor = self._stream(step.inputs[micro_batch], self.chunks[own])
        work = receive_from(tensor, action.peer, self._groups[action.payload])
        step.arriving[action.payload, micro_batch, own] = (work, tensor)

    def _awaited(self, payload: Payload, micro_batch: int, own: int, step: _Step) -> torch.Tensor:
        """What another chunk made: from another stage, or from another chunk of this one."""
        key = (payload, micro_batch, own)
        if key in step.here:
            return step.here.pop(key)
        work, tensor = step.arriving.pop(key)
        work.wait()
        return tensor

    def _stream(self, inputs: Inputs, chunk: Transformer) -> torch.Tensor:
        """Room for a micro-batch's residual stream, or its gradient: every stage knows its shape."""
        B, T = inputs.tokens_BT.shape
        shape = (B, T // chunk.stream_part[1], chunk.config.hidden_size)
        return torch.empty(shape, dtype=self._dtype, device=inputs.tokens_BT.device)


def _place(action: Action) -> tuple[int, int]:
    assert action.micro_batch is not None
    return action.micro_batch, action.model_chunk

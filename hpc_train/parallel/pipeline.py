"""Execute a stage's list of actions: forwards, backwards, and what travels between stages beside them.

The list is `plan.schedule`'s; nothing here decides an order. A send or a receive is posted where it stands in the
list, each by itself, and goes on beside the work behind it:

- warm-up: a forward waits for its own receive alone, which was posted before the work ahead of it
- in turn: beside a forward or a backward the next one's receive and the last one's send are under way
- cool-down: a backward likewise waits for its own receive alone

A send is awaited when a message has come that was made behind its receive, so that it costs no time and its tensor is
let go; without backwards no such message comes, and a later send waits for it; what is left at the end.

Source of the phases: Jiang et al., "MegaScale", NSDI'24, section 3.2.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpc_train.comm.collectives import Group, receive_from, send_to
from hpc_train.errors import ConfigError
from hpc_train.models.transformer import Inputs, Transformer
from hpc_train.parallel.split_backward import WeightQueue
from hpc_train.plan.schedule import Action, Direction, Op, Payload, Schedule, source_of
from hpc_train.record import NO_SEGMENT, Segment

Key = tuple[Payload, int, int]
"""What is kept or travels: its kind, micro-batch, and the model_chunk that made it or needs it."""
_LABELS = {Op.F: "forward", Op.B: "backward", Op.W: "backward of weights"}


@dataclass
class _Step:
    """What is alive while a list is executed.

    entered: what each forward got from before; left: what it gave. arriving, sending: posted and not yet awaited; what
    is sent by the stage that it goes to, in order.
    weights: what a B has left for its W; where backwards are not split, nothing is left.
    """

    inputs: Sequence[Inputs]
    losses: list[torch.Tensor | None]
    splits_backward: bool
    entered: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    left: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    here: dict[Key, torch.Tensor] = field(default_factory=dict)
    arriving: dict[Key, tuple[Action, Any, torch.Tensor]] = field(default_factory=dict)
    sending: defaultdict[int, deque[tuple[Any, torch.Tensor]]] = field(default_factory=lambda: defaultdict(deque))
    weights: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)


class Pipeline:
    """One rank's stage: its model chunks, and the groups over which its neighbours are reached.

    up, down: the pp ranks in the order of stages; what goes to a later stage travels on the first, what goes to an
    earlier one on the second. On NCCL they must be two communicators: operations of one run in the order in which they
    were posted. queues: of each chunk, where its linears leave their weights' gradients; None where they do not.
    """

    def __init__(
        self,
        chunks: Sequence[Transformer],
        up: Group,
        down: Group,
        dtype: torch.dtype,
        queues: Sequence[WeightQueue] | None = None,
    ) -> None:
        self.chunks = tuple(chunks)
        self.stage = up.group_rank
        self._groups = {Direction.UP: up, Direction.DOWN: down}
        self._dtype = dtype
        self._recorder = up.recorder
        self._queues = None if queues is None else tuple(queues)

    def run(
        self,
        schedule: Schedule,
        inputs: Sequence[Inputs],
        then: Mapping[Op, Callable[[Action], None]] | None = None,
        await_parameters: Callable[[int], None] | None = None,
    ) -> list[torch.Tensor]:
        """Execute this stage's list. Collective over the pipeline.

        Args:
            inputs: The micro-batches, the same on all stages.
            then: What carries out the actions that are not the pipeline's own.
            await_parameters: Called before each forward with its model_chunk; returns when that has its parameters.

        Returns:
            The summed loss of each micro-batch, detached; on the last stage only, else an empty list.

        Raises:
            ConfigError: the list has an action that nobody carries out.
        """
        actions = schedule.actions[self.stage]
        splits_backward = any(action.op is Op.W for action in actions)
        if splits_backward and self._queues is None:
            raise ConfigError("the schedule splits the backward (W actions), and this model's linears have no queue")
        step = _Step(inputs, [None] * len(inputs), splits_backward)

        def forward(action: Action) -> None:
            if await_parameters is not None:
                await_parameters(action.model_chunk)
            self._forward(action, schedule, step)

        actors: dict[Op, Callable[[Action], None]] = {
            Op.F: forward,
            Op.B: lambda action: self._backward(action, schedule, step),
            Op.W: lambda action: self._weights(action, step),
            Op.SEND: lambda action: self._send(action, step),
            Op.RECV: lambda action: self._receive(action, step),
            **(then or {}),
        }
        for action in actions:
            actor = actors.get(action.op)
            if actor is None:
                raise ConfigError(f"the schedule has {action.describe()}, which nothing here carries out")
            with self._timed(action):
                actor(action)
        for sends in step.sending.values():
            for work, _ in sends:
                work.wait()
        return [loss for loss in step.losses if loss is not None]

    def _timed(self, action: Action) -> Segment:
        label = _LABELS.get(action.op)
        if label is None:
            return NO_SEGMENT
        micro_batch, own = _place(action)
        return self._recorder.segment(label, micro_batch=micro_batch, model_chunk=own)

    def _forward(self, action: Action, schedule: Schedule, step: _Step) -> None:
        micro_batch, own = _place(action)
        inputs, chunk = step.inputs[micro_batch], self.chunks[own]
        entered = None
        if source_of(action, self.stage, schedule.chunks) is not None:
            entered = self._awaited(action, Payload.ACTIVATION, step)
            if torch.is_grad_enabled():
                step.entered[micro_batch, own] = entered.requires_grad_()
        left = chunk.hidden(entered, inputs)
        global_chunk = schedule.chunks[self.stage][own]
        if global_chunk == schedule.num_global_chunks - 1:
            left = chunk.loss(left, inputs.labels_BT)
            step.losses[micro_batch] = left.detach()
        elif schedule.places[global_chunk + 1][0] == self.stage:
            step.here[Payload.ACTIVATION, micro_batch, schedule.places[global_chunk + 1][1]] = left.detach()
            if not torch.is_grad_enabled():
                return
        step.left[micro_batch, own] = left

    def _backward(self, action: Action, schedule: Schedule, step: _Step) -> None:
        micro_batch, own = _place(action)
        left = step.left.pop((micro_batch, own))
        gradient = None
        if source_of(action, self.stage, schedule.chunks) is not None:
            gradient = self._awaited(action, Payload.GRADIENT, step)
        torch.autograd.backward(left, gradient)
        if self._queues is not None:
            step.weights[micro_batch, own] = self._queues[own].take()
            if not step.splits_backward:
                step.weights.pop((micro_batch, own))()
        entered = step.entered.pop((micro_batch, own), None)
        if entered is None:
            return
        assert entered.grad is not None
        global_chunk = schedule.chunks[self.stage][own]
        peer, there = schedule.places[global_chunk - 1]
        key = (Payload.GRADIENT, micro_batch, there if peer == self.stage else own)
        step.here[key] = entered.grad

    def _weights(self, action: Action, step: _Step) -> None:
        step.weights.pop(_place(action))()

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
        self._end_sends(action, step)
        group = self._groups[Direction.of(self.stage, action.peer)]
        step.sending[action.peer].append((send_to(tensor, action.peer, group), tensor))

    def _receive(self, action: Action, step: _Step) -> None:
        micro_batch, own = _place(action)
        assert action.payload is not None and action.peer is not None
        tensor = self._stream(step.inputs[micro_batch], self.chunks[own])
        work = receive_from(tensor, action.peer, self._groups[Direction.of(action.peer, self.stage)])
        step.arriving[action.payload, micro_batch, own] = (action, work, tensor)

    def _awaited(self, action: Action, payload: Payload, step: _Step) -> torch.Tensor:
        """What another chunk made: from another stage, or from another chunk of this one."""
        key = (payload, *_place(action))
        if key in step.here:
            return step.here.pop(key)
        receive, work, tensor = step.arriving.pop(key)
        work.wait()
        self._end_sends(receive, step)
        return tensor

    def _end_sends(self, action: Action, step: _Step) -> None:
        """Let go of the sends to the action's peer that are over, or that it waits for."""
        assert action.peer is not None
        for _ in range(action.sends_over):
            step.sending[action.peer].popleft()[0].wait()

    def _stream(self, inputs: Inputs, chunk: Transformer) -> torch.Tensor:
        """Room for a micro-batch's residual stream, or its gradient: every stage knows its shape."""
        B, T = inputs.tokens_BT.shape
        shape = (B, T // chunk.stream_part[1], chunk.config.hidden_size)
        return torch.empty(shape, dtype=self._dtype, device=inputs.tokens_BT.device)


def _place(action: Action) -> tuple[int, int]:
    assert action.micro_batch is not None
    return action.micro_batch, action.model_chunk

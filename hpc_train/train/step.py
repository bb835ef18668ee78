"""One optimizer update: micro-batches, gradient sum, norm, clipping, update.

1. the micro-batches are made ready, while parameters that the step before has updated are on their way
2. this rank's list of actions: forwards and backwards of its part of the micro-batches; beside them all-gathers of the
   model_chunks' parameters and, behind each chunk's last backward, the sum of its gradients over the dp group;
   with early updates also the update of some chunks and their gathers for the next step (`train.early_updates`)
3. one sum over all ranks of (loss, supervised tokens, squared norm, wishes to stop): from here all know the same
4. if they are finite: scale by tokens and clip, update this rank's shards, the first one needed first, and begin to
   gather them; else skip, on all alike. Early updates stand if nothing is clipped or skipped, and else are taken back
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hpc_train.comm.collectives import all_reduce_sum
from hpc_train.comm.groups import Groups
from hpc_train.models.attention import AttentionPlan
from hpc_train.models.dropout import DropoutKey
from hpc_train.models.transformer import Inputs
from hpc_train.parallel.chunk_collectives import ChunkCollectives
from hpc_train.parallel.data import ShardedParameters
from hpc_train.parallel.hybrid import check_pieces, piece_inputs
from hpc_train.parallel.offload import HostRoom, OffloadedLayers
from hpc_train.parallel.pipeline import Pipeline
from hpc_train.plan.batch_agree import digest_summands, is_same_digest
from hpc_train.plan.batch_pieces import PieceBatch
from hpc_train.plan.groups import HDP
from hpc_train.plan.schedule import Op, Schedule
from hpc_train.plan.schedule_collectives import early_chunks, plan_evaluation, plan_training
from hpc_train.plan.schedule_orders import Kind
from hpc_train.record import Kind as SegmentKind
from hpc_train.train.early_updates import EarlyUpdates
from hpc_train.train.optimizer import ShardedAdamW, ShardedOptimizer, piece_norms

if TYPE_CHECKING:
    from hpc_train.data.loader import Batch


@dataclass(frozen=True)
class StepResult:
    """Figures of one step over all ranks. loss: nats per supervised token; grad_norm: of the mean gradient; both are
    NaN in a step without a supervised token.

    stop_wanted: some rank wants the run to stop after this step. mean_length: of the sequences of tokens in pieces, 0
    where batches are rows. has_same_plan: all ranks have the same plan of the next step.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    num_supervised: int
    skipped: bool
    stop_wanted: bool = False
    mean_length: float = 0.0
    has_same_plan: bool = True


def _never() -> bool:
    return False


@dataclass
class Trainer:
    """The parts of a training state that a step changes, and how this rank works with the others.

    parameters: of each model_chunk. schedule: the kind of the pipeline's plan. overlap: whether gathers of parameters
    and sums of gradients run beside other work. early_updates: whether steps may have updates ahead of the norm, where
    a stage has chunks enough.
    has_tied: first and last chunk hold a copy each of the embeddings. seed, dropout: what is dropped out is a function
    of the seed and the step's number. token_unit: micro-batches of pieces have a multiple of so many tokens, which a tp
    group can share.
    """

    pipeline: Pipeline
    parameters: tuple[ShardedParameters, ...]
    optimizer: ShardedOptimizer
    groups: Groups
    clip_grad_norm: float | None
    device: torch.device
    schedule: Kind = "1f1b"
    overlap: bool = True
    early_updates: bool = False
    has_tied: bool = False
    seed: int = 0
    dropout: float = 0.0
    token_unit: int = 1

    def __post_init__(self) -> None:
        self._early: EarlyUpdates | None = None
        has_tied_last = self.has_tied and self._num_stages == 1
        if self.early_updates and early_chunks(len(self.parameters), has_tied_last=has_tied_last):
            assert isinstance(self.optimizer, ShardedAdamW), "the configuration refuses others"
            self._early = EarlyUpdates(self.parameters, self.optimizer, self.clip_grad_norm, self.groups.world)
        update = None if self._early is None else self._early.update
        self._collectives = ChunkCollectives(self.parameters, self.groups, overlap=self.overlap, update=update)
        self._host = HostRoom(self.device)

    def step(
        self,
        number: int,
        micro_batches: Iterable[Batch | PieceBatch],
        lr: float,
        stop_wanted: Callable[[], bool] = _never,
        next_plan: Callable[[], bytes] | None = None,
    ) -> StepResult:
        """Collective over all ranks. micro_batches: of this rank's place on the dp axis; of pieces, any number
        of them.

        number: the step's, from 1. stop_wanted is asked once, late in the step, and so is next_plan for the digest of
        the next step's batch plan, which ranks compare before they meet in its rings.
        """
        self._collectives.begin_step()
        recorder = self.groups.recorder
        for chunk in self.parameters:
            chunk.zero_gradients()
        with recorder.segment("data", SegmentKind.DATA):
            batches = list(micro_batches)
        check_pieces([batch for batch in batches if isinstance(batch, PieceBatch)], self.pipeline.chunks)
        schedule = self._plan(len(batches))
        if self._early is not None and self._early.is_due:
            self._early.begin_step(lr, self._num_supervised(batches))
        losses = self._run(schedule, self._inputs(batches, number))
        square = self._sum_of_squares(schedule)
        digest = None if next_plan is None else next_plan()
        counts = [*self._counts(losses, batches), square, int(stop_wanted())]
        words = [] if digest is None else digest_summands(digest)
        sums = all_reduce_sum([*counts, *words], self.groups.world, self.device)
        loss_sum, tokens, supervised, lengths, square, wishes = sums[: len(counts)]
        has_same_plan = digest is None or is_same_digest(sums[len(counts) :], digest, self.groups.world.group_size)
        recorder.anchor()  # the device has given the sums, so it has nothing left to do
        skipped = not (math.isfinite(loss_sum) and math.isfinite(square) and supervised > 0)
        grad_norm = math.sqrt(square) / supervised if supervised else math.nan
        updated = () if self._early is None else self._early.settle(None if skipped else grad_norm)
        if not skipped:
            with recorder.segment("optimizer"):
                self._update(lr, self._gradient_scale(grad_norm) / supervised, updated)
        loss = loss_sum / supervised if supervised else math.nan
        mean_length = lengths / tokens if tokens else 0.0
        return StepResult(
            loss, grad_norm, int(tokens), int(supervised), skipped, wishes > 0, mean_length, has_same_plan
        )

    def finish(self) -> None:
        """Return when nothing is under way for a step that may not come. Called by all ranks behind the last one."""
        for chunk in self.parameters:
            chunk.end_gather()

    def publish_parameters(self) -> None:
        """Give master weights that were set anew to every rank's model, now. Collective over the dp group."""
        for chunk in self.parameters:
            chunk.publish_shard()
            chunk.begin_gather()
        for chunk in self.parameters:
            chunk.await_parameters()

    @torch.no_grad()
    def evaluate(self, steps: Iterable[Iterable[Batch | PieceBatch]]) -> float:
        """Mean loss, in nats per supervised token, over this place's micro-batches of each step. Collective."""
        loss_sum, num_supervised = 0.0, 0.0
        for micro_batches in steps:
            batches = list(micro_batches)
            schedule = plan_evaluation(self._num_stages, len(batches), len(self.parameters))
            losses = self._run(schedule, self._inputs(batches, None))
            own_loss, _, own_supervised, _ = self._counts(losses, batches)
            loss_sum, num_supervised = loss_sum + own_loss, num_supervised + own_supervised
        loss_sum, supervised = all_reduce_sum([loss_sum, num_supervised], self.groups.world, self.device)
        return loss_sum / supervised if supervised else math.nan

    @property
    def _num_stages(self) -> int:
        return self.groups.mesh.pp

    def _plan(self, num_micro_batches: int) -> Schedule:
        return plan_training(
            self.schedule,
            self._num_stages,
            num_micro_batches,
            len(self.parameters),
            has_tied=self.has_tied,
            early_updates=self._early is not None and self._early.is_due,
        )

    def _update(self, lr: float, scale: float, updated: Collection[int]) -> None:
        """Update the shards of all model_chunks but those that are updated already, and begin to gather them."""
        for index, chunk in enumerate(self.parameters):
            if index not in updated:
                chunk.gradient_shard.mul_(scale)
        self.optimizer.step(lr, updated, self._collectives.publish)

    def _run(self, schedule: Schedule, inputs: Sequence[Inputs]) -> list[torch.Tensor]:
        return self.pipeline.run(schedule, inputs, self._collectives.actors, self._collectives.await_parameters)

    def _inputs(self, batches: Sequence[Batch | PieceBatch], number: int | None) -> list[Inputs]:
        """The micro-batches on this rank's device. number: the step's; None where nothing is dropped out."""
        return [self._input(batch, number) for batch in batches]

    def _input(self, batch: Batch | PieceBatch, number: int | None) -> Inputs:
        dropped = (self.dropout, self.seed, number) if self.dropout and number is not None else None
        if isinstance(batch, PieceBatch):
            return self._pieces(batch, dropped)
        key = None
        if dropped is not None:
            key = DropoutKey(*dropped, torch.tensor(batch.sequences, device=self.device))
        return Inputs(
            batch.tokens.to(self.device),
            batch.labels.to(self.device),
            batch.positions.to(self.device),
            AttentionPlan.from_boundaries(batch.boundaries, batch.tokens.shape[1], self.device),
            key,
        )

    def _pieces(self, batch: PieceBatch, dropped: tuple[float, int, int] | None) -> Inputs:
        saving, share_milli = None, batch.micro_batch.offload_milli
        if share_milli:
            saving = OffloadedLayers(self._host, share_milli, [chunk.parameters for chunk in self.parameters])
        group = self.groups.along(HDP)
        return piece_inputs(batch, group, self.token_unit, self.device, dropout=dropped, saving=saving)

    def _counts(
        self, losses: Sequence[torch.Tensor], batches: Sequence[Batch | PieceBatch]
    ) -> tuple[float, float, float, float]:
        """What this rank adds to the sums over all: a micro-batch counts on one rank of those that share it."""
        if not self._counts_batches:
            return 0.0, 0.0, 0.0, 0.0
        loss_sum = math.fsum(float(loss) for loss in losses)
        tokens = sum(batch.num_tokens for batch in batches)
        lengths = sum(batch.sum_of_lengths for batch in batches if isinstance(batch, PieceBatch))
        return loss_sum, float(tokens), self._num_supervised(batches), float(lengths)

    @property
    def _counts_batches(self) -> bool:
        coords = self.groups.coords
        return coords["tp"] == 0 and coords["pp"] == self._num_stages - 1

    def _num_supervised(self, batches: Sequence[Batch | PieceBatch]) -> float:
        return float(sum(batch.num_supervised for batch in batches)) if self._counts_batches else 0.0

    def _sum_of_squares(self, schedule: Schedule) -> float:
        """Of the gradients that this rank counts: norms of pieces in fp32, added in double.

        What can be done while the last sums are under way is done in their order.
        """
        of_chunks = {} if self._early is None else dict(self._early.norms)
        for action in schedule.actions[self.groups.coords["pp"]]:
            if action.op is Op.REDUCE_SCATTER and action.model_chunk not in of_chunks:
                chunk = self.parameters[action.model_chunk]
                chunk.await_gradients()
                of_chunks[action.model_chunk] = piece_norms(chunk)
        norms = [norm for index in sorted(of_chunks) for norm in of_chunks[index]]
        # As exact as double throughout to 1e-7, without its conversion.
        return float(torch.stack(norms).double().square().sum()) if norms else 0.0

    def _gradient_scale(self, grad_norm: float) -> float:
        if self.clip_grad_norm is None or grad_norm <= self.clip_grad_norm:
            return 1.0
        return self.clip_grad_norm / grad_norm

"""How much of data parallel's communication a schedule can hide: what simulation adds to a step without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.config import Config
from hpc_train.plan.axis_bytes import dp_element_bytes, is_split_by_tokens, micro_batches_of
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.parameters import TensorSplit, plan_parameters
from hpc_train.plan.schedule import COLLECTIVES, COMPUTE, Action, Op, Schedule
from hpc_train.plan.schedule_collectives import early_chunks, plan_training, updates_early
from hpc_train.plan.schedule_steps import Costs
from hpc_train.plan.simulate import Makespans, time_of_work
from hpc_train.plan.stages import chunk_costs, stage_parts
from hpc_train.plan.steady import PLAYED_STEPS, StepPeriods, without_needless_gathers

RATIOS = (0.2, 0.5, 0.8)
"""Of dp's transfers alone to compute alone, for which `best_hidden` says what can be hidden."""
_MOST_PLAYED = 4000
"""Forwards of all stages and chunks that are played (measured: 0.1 ms each, for three ratios together)."""


@dataclass(frozen=True)
class HiddenShare:
    """Times in the unit of the costs.

    makespan: of a step. compute: of the step if its transfers took no time. communication: all transfers of one kind,
    of the stage, or the line between two of them, that has most.
    """

    makespan: int
    compute: int
    communication: int

    @property
    def added(self) -> int:
        """By how much transfers make the step longer."""
        return self.makespan - self.compute

    @property
    def share(self) -> float:
        """Of the transfers' time, what is beside compute or would be idle; 1.0 where there are none."""
        return 1.0 - self.added / self.communication if self.communication else 1.0


def hidden_shares(schedule: Schedule, costs: Sequence[Costs]) -> list[HiddenShare]:
    """The best that an execution of the schedule can do: everything begins as early as its list allows.

    Where gathers for the next step are begun early, of a step among others like it.

    Args:
        costs: Some, with a result for each; the pipeline's messages take no time in them.
    """
    carried_out = without_needless_gathers(schedule)
    steps = StepPeriods(schedule) if schedule.has_early_updates else Makespans(schedule)
    return [
        HiddenShare(
            steps.of(of_action),
            compute_alone(schedule, of_action),
            max(
                sum(of_action(stage, action) for action in actions if action.op in COLLECTIVES)
                for stage, actions in enumerate(carried_out.actions)
            ),
        )
        for of_action in costs
    ]


def compute_alone(schedule: Schedule, costs: Costs) -> int:
    """The makespan of a step if nothing but F, B and W took time."""
    work = [[action for action in actions if action.op in COMPUTE] for actions in schedule.actions]
    return time_of_work(work, schedule.chunks, costs)


def best_hidden(config: Config, mesh: Mesh, ratios: Sequence[float] = RATIOS) -> tuple[tuple[float, float], ...]:
    """For each ratio (dp's transfers of the rank that sends most, to its compute) the share of them that can be hidden.

    Messages of the pipeline take no time here, and data loading hides nothing. Early updates are taken to be confirmed,
    as where gradients are not clipped. Nothing where dp is 1, overlap off, or the schedule too long to be played in
    passing: more than _MOST_PLAYED forwards.

    Raises:
        ConfigError: the model or the batch cannot be split so.
    """
    if mesh.dp * mesh.cp == 1 or not config.parallel.overlap:
        return ()
    parallel, num_micro_batches = config.parallel, micro_batches_of(config, mesh)
    # What is not hidden lies beside the first forwards and the last backwards; micro-batches between change nothing.
    played = min(num_micro_batches, 2 * mesh.pp)
    is_early = updates_early(config, mesh) and bool(early_chunks(parallel.virtual_stages, has_tied_last=False))
    if played * mesh.pp * parallel.virtual_stages * (PLAYED_STEPS if is_early else 1) > _MOST_PLAYED:
        return ()
    tied = config.model.tied_embeddings
    schedule = plan_training(
        parallel.schedule,
        mesh.pp,
        played,
        parallel.virtual_stages,
        has_tied=tied,
        early_updates=is_early,
    )
    compute, elements = chunk_costs(config, mesh), _chunk_elements(config, mesh)
    parameter_bytes, gradient_bytes = dp_element_bytes(config)
    widths = {Op.ALL_GATHER: parameter_bytes, Op.UPDATE: parameter_bytes, Op.REDUCE_SCATTER: gradient_bytes}
    busiest = num_micro_batches * max(sum(compute[stage :: mesh.pp]) for stage in range(mesh.pp))
    largest = (parameter_bytes + gradient_bytes) * max(sum(elements[stage :: mesh.pp]) for stage in range(mesh.pp))
    # A backward is twice a forward, or a third each for its B and W.
    thirds = {Op.F: 1, Op.B: 1 if schedule.splits_backward else 2, Op.W: 1}

    def cost_with(ratio: float) -> Costs:
        def cost(stage: int, action: Action) -> int:
            chunk = schedule.chunks[stage][action.model_chunk]
            if action.op in thirds:
                return compute[chunk] * thirds[action.op] // 3
            if action.op in widths:
                return int(ratio * busiest / largest * elements[chunk] * widths[action.op])
            return 0

        return cost

    found = hidden_shares(schedule, [cost_with(ratio) for ratio in ratios])
    return tuple((ratio, hidden.share) for ratio, hidden in zip(ratios, found, strict=True))


def _chunk_elements(config: Config, mesh: Mesh) -> list[int]:
    """Parameters of each global chunk on one rank."""
    split = TensorSplit(mesh.tp, 0, is_split_by_tokens(config, mesh))
    return [
        sum(plan.box.num_elements for plan in plan_parameters(config.model, config.data.seq_len, part, split))
        for part in stage_parts(config, mesh)
    ]

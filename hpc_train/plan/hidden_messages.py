"""How much of a pipeline's messages its schedule can hide: what simulation adds to a step without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hpc_train.config import Config
from hpc_train.plan.axis_bytes import micro_batches_of
from hpc_train.plan.hidden import RATIOS, HiddenShare
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.schedule import TRANSFERS, Action, Op, Schedule
from hpc_train.plan.schedule_orders import plan_schedule
from hpc_train.plan.schedule_steps import Costs
from hpc_train.plan.simulate import simulate
from hpc_train.plan.stages import chunk_costs

_MOST_PLAYED = 2000
"""Forwards of all stages and chunks that are played (measured: 0.1 ms each for each ratio, while a plan is made)."""


def hidden_messages(schedule: Schedule, costs: Costs) -> HiddenShare:
    """The best that an execution of the schedule can do: every message begins as early as its list allows.

    communication: of the line from one stage to another one that has most, its messages one behind the other. Where a
    micro-batch has several such lines on its way, a step may become longer by more than that; the share is then below
    0.
    """

    def without(stage: int, action: Action) -> int:
        return 0 if action.op in TRANSFERS else costs(stage, action)

    lines: Counter[tuple[int, int | None]] = Counter()
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            if action.op is Op.SEND:
                lines[stage, action.peer] += costs(stage, action)
    return HiddenShare(
        simulate(schedule, costs).makespan, simulate(schedule, without).makespan, max(lines.values(), default=0)
    )


def best_hidden_messages(
    config: Config, mesh: Mesh, ratios: Sequence[float] = RATIOS
) -> tuple[tuple[float, float], ...]:
    """For each ratio (the messages of a line from one stage to another, to a step without any) the share of them that
    can be hidden, 0 where they make the step longer by all their time or more.

    Gathers and sums of dp take no time here. Nothing where pp is 1, or the schedule too long to be played in passing:
    more than _MOST_PLAYED forwards.

    Raises:
        ConfigError: the model or the batch cannot be split so.
    """
    parallel, num_micro_batches = config.parallel, micro_batches_of(config, mesh)
    if mesh.pp == 1 or num_micro_batches * mesh.pp * parallel.virtual_stages > _MOST_PLAYED:
        return ()
    schedule = plan_schedule(parallel.schedule, mesh.pp, num_micro_batches, parallel.virtual_stages)
    compute = chunk_costs(config, mesh)
    # A backward is twice a forward, or a third each for its B and W.
    thirds = {Op.F: 1, Op.B: 1 if schedule.splits_backward else 2, Op.W: 1}

    def cost_with(message: int) -> Costs:
        def cost(stage: int, action: Action) -> int:
            if action.op in thirds:
                return compute[schedule.chunks[stage][action.model_chunk]] * thirds[action.op] // 3
            return message if action.op is Op.SEND else 0

        return cost

    # One for each message shows how many the busiest line has.
    alone = hidden_messages(schedule, cost_with(1))
    found = []
    for ratio in ratios:
        message = int(ratio * alone.compute / alone.communication)
        found.append((ratio, max(0.0, hidden_messages(schedule, cost_with(message)).share)))
    return tuple(found)

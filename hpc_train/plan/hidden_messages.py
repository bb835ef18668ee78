"""How much of a pipeline's messages its schedule can hide: what simulation adds to a step without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hpc_train.config import Config
from hpc_train.plan.axis_bytes import micro_batches_of
from hpc_train.plan.hidden import RATIOS, HiddenShare, compute_alone
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.schedule import Action, Op, Schedule
from hpc_train.plan.schedule_orders import plan_schedule
from hpc_train.plan.schedule_steps import Costs
from hpc_train.plan.simulate import Makespans
from hpc_train.plan.stages import chunk_costs

_MOST_PLAYED = 2000
"""Forwards of all stages and chunks that are played (measured: 0.1 ms each, for three ratios together)."""


def hidden_messages(schedule: Schedule, costs: Sequence[Costs]) -> list[HiddenShare]:
    """For each of the costs the best that an execution of the schedule can do: every message begins as early as its
    list allows. Nothing else than work and messages takes time.

    communication: of the line from one stage to another one that has most, its messages one behind the other. Where a
    micro-batch has several such lines on its way, a step may become longer by more than that; the share is then below
    0.
    """
    makespans = Makespans(schedule)
    return [
        HiddenShare(makespans.of(of_action), compute_alone(schedule, of_action), _busiest_line(schedule, of_action))
        for of_action in costs
    ]


def _busiest_line(schedule: Schedule, costs: Costs) -> int:
    """Of the messages from one stage to another."""
    lines: Counter[tuple[int, int | None]] = Counter()
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            if action.op is Op.SEND:
                lines[stage, action.peer] += costs(stage, action)
    return max(lines.values(), default=0)


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
    alone, num_messages = compute_alone(schedule, cost_with(1)), _busiest_line(schedule, cost_with(1))
    found = hidden_messages(schedule, [cost_with(int(ratio * alone / num_messages)) for ratio in ratios])
    return tuple((ratio, max(0.0, hidden.share)) for ratio, hidden in zip(ratios, found, strict=True))

"""How long a schedule takes: each stage's busy time, the makespan and the bubble, from a cost for each action."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.plan.play import play
from hpc_train.plan.schedule import COMPUTE, Action, Op, Schedule
from hpc_train.plan.schedule_steps import Costs, pipeline_steps


@dataclass(frozen=True)
class Simulation:
    """spans: start and end of each action of each stage; of a send or another post, when it was posted.

    busy: time a stage spends in F, B and W. makespan: until every stage has done its list and all it sent is gone.
    """

    spans: tuple[tuple[tuple[int, int], ...], ...]
    busy: tuple[int, ...]
    makespan: int

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they do not compute."""
        whole = self.makespan * len(self.busy)
        return (whole - sum(self.busy)) / whole if whole else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Play a schedule that `check_schedule` accepts; its transfers run beside the stages' work.

    Messages of one direction follow one another; collectives are taken to find the other pipelines ready.
    """
    played = play(pipeline_steps([schedule], costs))
    if played.stuck:
        raise ValueError("the schedule deadlocks; check_schedule says where")
    busy = tuple(
        sum(end - start for action, (start, end) in zip(actions, spans, strict=True) if action.op in COMPUTE)
        for actions, spans in zip(schedule.actions, played.spans, strict=True)
    )
    return Simulation(played.spans, busy, max(played.ends))


def even_costs(
    *, forward: int, backward: int, weight: int = 0, transfer: int = 0, gather: int = 0, reduce: int = 0
) -> Costs:
    """The same costs for every stage, chunk and micro-batch; copies cost nothing, and an early update its gather.

    backward: of B as the schedule has it, so of the inputs alone where it has W.
    """
    by_op = {Op.F: forward, Op.B: backward, Op.W: weight, Op.SEND: transfer}
    by_op |= {Op.ALL_GATHER: gather, Op.UPDATE: gather, Op.REDUCE_SCATTER: reduce}

    def cost(stage: int, action: Action) -> int:
        return by_op.get(action.op, 0)

    return cost

"""Costs of actions that tests and benchmarks play schedules with."""

from __future__ import annotations

from hpc_train.plan.schedule import Action, Op
from hpc_train.plan.simulate import Costs


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

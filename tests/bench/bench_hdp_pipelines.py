"""Step time where hdp ranks are pipelines: 1F1B on ranks of 4 stages, all rings and messages played. Prints JSON.

8M tokens a step, lengths a quarter of those of bench_hdp_planner, so that the longest (512K) needs 64 ranks. A forward
takes what the batch costs say, a backward twice as much. `to_ideal` is the step over the mean work of a rank. With
virtual stages a stage's work is in so many chunks, and ranks get equally many micro-batches, as `BatchSetup` gives.

    python -m tests.bench.bench_hdp_pipelines [--ranks 64 256] [--seeds 3] [--virtual-stages 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from typing import Any

import numpy as np

from hpc_train.errors import ConfigError
from hpc_train.plan.batch_balanced import BalancedPlanner
from hpc_train.plan.batch_naive import NaivePlanner
from hpc_train.plan.batch_play import check_rings, play_rings
from hpc_train.plan.batch_problem import BatchPlanner, BatchProblem
from hpc_train.plan.batch_static import StaticPlanner
from hpc_train.plan.schedule import Action, Op
from hpc_train.plan.schedule_orders import plan_1f1b
from tests.bench.bench_hdp_planner import make_problem
from tests.bench.hdp_lengths import KI, STEP_TOKENS, tailed_lengths

NUM_STAGES = 4
PLANNERS: dict[str, BatchPlanner] = {
    "balanced, pp": BalancedPlanner(strategy="pp", num_stages=NUM_STAGES),
    "balanced, dp": BalancedPlanner(num_stages=NUM_STAGES),
    "naive": NaivePlanner(),
    "static": StaticPlanner(context=512 * KI),
}


def measure(planner: BatchPlanner, problem: BatchProblem, virtual_stages: int) -> dict[str, Any]:
    table = planner.plan(problem)
    if virtual_stages > 1:
        counts = np.maximum(table.num_micro_batches, NUM_STAGES)
        table = replace(table, num_micro_batches=np.full_like(counts, counts.max()))
    plan = table.plan()
    schedules = [plan_1f1b(NUM_STAGES, len(mine), virtual_stages=virtual_stages) for mine in plan.ranks]
    try:
        check_rings(plan, schedules)
    except ConfigError as deadlock:
        return {"deadlocks": str(deadlock)[:120]}
    squares, tokens = table.pack_sums()
    ticks = problem.costs.micro_batch(squares, tokens, table.sizes)
    of_micro_batch: list[dict[int, int]] = [{} for _ in plan.ranks]
    for pack in range(table.num_packs):
        for member in range(int(table.first_rank[pack]), int(table.first_rank[pack + 1])):
            of_micro_batch[int(table.ranks[member])][int(table.micro_batch[member])] = int(ticks[pack])

    def duration(rank: int, action: Action) -> int:
        assert action.micro_batch is not None
        return of_micro_batch[rank].get(action.micro_batch, 0) * (1 if action.op is Op.F else 2) // virtual_stages

    step = max(play_rings(plan, schedules, duration).ends)
    work = sum(3 * sum(of_rank.values()) for of_rank in of_micro_batch) / len(of_micro_batch)
    return {
        "ticks": step,
        "to_ideal": round(step / work, 4),
        "micro_batches": [min(map(len, plan.ranks)), max(map(len, plan.ranks))],
    }


def measure_seeds(num_ranks: int, seeds: int, virtual_stages: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in PLANNERS}
    for seed in range(seeds):
        problem = make_problem(-(-tailed_lengths(seed, STEP_TOKENS) // 4), num_ranks)
        for name, planner in PLANNERS.items():
            found[name].append(measure(planner, problem, virtual_stages))
    static = [run["ticks"] for run in found["static"]]
    speed_up = {
        name: round(statistics.median(base / run["ticks"] for base, run in zip(static, runs, strict=True)), 3)
        for name, runs in found.items()
        if all("ticks" in run for run in runs)
    }
    return {"speed_up_to_static": speed_up, "runs": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--virtual-stages", type=int, default=1)
    arguments = parser.parse_args()
    found = {
        f"{num_ranks} ranks": measure_seeds(num_ranks, arguments.seeds, arguments.virtual_stages)
        for num_ranks in arguments.ranks
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

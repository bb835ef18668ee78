"""Modelled step time of hybrid data parallelism against fixed context parallelism, beside published speed-ups.

LLaMA-7B on 512 ranks (1,024 GPUs with tp 2), 8,192 tokens a rank, 32M tokens a step of GitHub's lengths cut at the
context. Attention and the rest of a layer as published by length; one number is fitted to the published speed-ups of
256K and 1M: the bandwidth at which rings pass keys and values. 512K and 2M are then predictions. Prints JSON.

    python -m tests.bench.bench_hdp_speedup [--steps 30]
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.plan.batch_balanced import BalancedPlanner
from hpc_train.plan.batch_cost import BatchCosts
from hpc_train.plan.batch_naive import NaivePlanner
from hpc_train.plan.batch_problem import BatchPlanner, BatchProblem, HdpRanks
from hpc_train.plan.batch_static import StaticPlanner, smallest_cp
from hpc_train.plan.batch_times import model_times
from tests.bench.hdp_lengths import KI, MI, github_steps

NUM_RANKS, CAPACITY = 512, 8192
# Cited: ByteScale (arXiv 2502.21231), fit of its times: attention 9.21e-9 s^2 + 1.32e-4 s ms, MLP 2.2e-4 s ms.
ATTENTION_S, LINEAR_S = 9.21e-12, (1.32e-4 + 2.2e-4) * 1e-3
# Keys and values of a token: 8 groups, 128 numbers, 2 bytes, two of them, on one of 2 tp ranks.
KV_BYTES = 8 * 128 * 2 * 2 // 2
# Cited: speed-ups of LLaMA-7B on GitHub over static parallelism: naive, balanced.
PUBLISHED = {256 * KI: (1.28, 1.73), MI: (2.25, 4.56)}
CONTEXTS = (256 * KI, 512 * KI, MI, 2 * MI)


def costs_at(bytes_per_s: float) -> BatchCosts:
    return BatchCosts.from_seconds(
        attention_s_per_square=ATTENTION_S, linear_s_per_token=LINEAR_S, ring_s_per_token=KV_BYTES / bytes_per_s
    )


def total_ticks(planner: BatchPlanner, steps: list[NDArray[np.int64]], costs: BatchCosts) -> int:
    ranks = HdpRanks.alike(NUM_RANKS, CAPACITY)
    problems = [BatchProblem.make(number, lengths, ranks, costs) for number, lengths in enumerate(steps)]
    return sum(model_times(planner.plan(problem), ranks, costs).makespan for problem in problems)


def speed_ups(context: int, steps: list[NDArray[np.int64]], costs: BatchCosts) -> dict[str, float]:
    static = total_ticks(StaticPlanner(context), steps, costs)
    return {
        "naive": static / total_ticks(NaivePlanner(), steps, costs),
        "balanced": static / total_ticks(BalancedPlanner(), steps, costs),
    }


def misfit(found: dict[int, dict[str, float]]) -> float:
    return sum(math.log(found[context]["balanced"] / PUBLISHED[context][1]) ** 2 for context in PUBLISHED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    steps = {context: github_steps(arguments.steps, context) for context in CONTEXTS}
    tried = {}
    for gigabytes in range(50, 85, 5):
        costs = costs_at(gigabytes * 1e9)
        tried[gigabytes] = misfit({context: speed_ups(context, steps[context], costs) for context in PUBLISHED})
    fitted = min(tried, key=lambda gigabytes: tried[gigabytes])
    report: dict[str, Any] = {"fitted_gigabytes_per_s": fitted, "steps": arguments.steps}
    for context in CONTEXTS:
        found = speed_ups(context, steps[context], costs_at(fitted * 1e9))
        published = dict(zip(("naive", "balanced"), PUBLISHED.get(context, ()), strict=False))
        report[f"{context // KI}K"] = {
            "cp_of_static": smallest_cp(context, CAPACITY, NUM_RANKS),
            "modelled": {name: round(value, 3) for name, value in found.items()},
            "published": published,
            "to_published": {name: round(found[name] / value, 3) for name, value in published.items()},
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""Batch planners on 32M tokens a step: makespan over the lower bound, planning time, what rings send. Prints JSON.

Time of a sequence of s tokens on D ranks, per layer: s * s + 24576 * s on one; max(s * s / D, 5560 * s) + 24576 * s / D
on more (ByteScale's measured times, arXiv 2502.21231). Every micro-batch has at most 8,192 tokens on a rank.

    python -m tests.bench.bench_hdp_planner [--ranks 256 1024 4096] [--seeds 10] [--public-seeds 1] [--verl FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.plan.batch_balanced import BalancedPlanner
from hpc_train.plan.batch_check import check_batch_plan
from hpc_train.plan.batch_cost import BatchCosts
from hpc_train.plan.batch_naive import NaivePlanner
from hpc_train.plan.batch_problem import BatchPlanner, BatchProblem, HdpRanks, lower_bound
from hpc_train.plan.batch_static import StaticPlanner
from hpc_train.plan.batch_times import model_times, ring_tokens
from tests.bench.hdp_lengths import KI, MI, STEP_TOKENS, tailed_lengths
from tests.bench.public_planners import megatron_times, verl_times

CAPACITY = 8192
COSTS = BatchCosts(attention_per_square=1, linear_per_token=24576, ring_per_token=5560)
# Cited: 2.8 ms of attention for 8,192 squared; so a unit is 4.2e-11 s of one layer's forward.
UNIT_S = 2.8e-3 / 8192**2
LAYERS, FORWARD_AND_BACKWARD = 32, 3

PLANNERS: dict[str, BatchPlanner] = {
    # As runs plan, whose longest sequence has 2M tokens.
    "balanced": BalancedPlanner(context=2 * MI),
    "balanced, pp": BalancedPlanner(strategy="pp", num_stages=4, context=2 * MI),
    "balanced, smallest rings": BalancedPlanner(grows_rings=False),
    "balanced, slack 0.15": BalancedPlanner(slack_milli=150),
    "naive": NaivePlanner(),
    "static": StaticPlanner(context=2 * MI),
}


def make_problem(lengths: NDArray[np.int64], ranks: HdpRanks | int) -> BatchProblem:
    ranks = HdpRanks.alike(ranks, CAPACITY) if isinstance(ranks, int) else ranks
    return BatchProblem.make(0, lengths, ranks, COSTS)


def smallest_ring_tokens(problem: BatchProblem) -> int:
    return int((problem.lengths * (problem.smallest_sizes - 1)).sum())


def fewest_ring_tokens(problem: BatchProblem, ticks: float) -> int:
    """What a plan that takes no longer sends at least: each sequence on the fewest alike ranks that are fast enough."""
    fewest = problem.smallest_sizes.copy()
    for at in np.argsort(-problem.lengths)[:64]:
        length = int(problem.lengths[at])
        sizes = np.arange(int(fewest[at]), len(problem.ranks) + 1)
        times = np.asarray(problem.costs.micro_batch(length**2, length, sizes)).reshape(-1)
        fewest[at] = sizes[int(np.argmax(times <= ticks))]
    return int((problem.lengths * (fewest - 1)).sum())


def measure(planner: BatchPlanner, problem: BatchProblem, repeat: int = 1) -> dict[str, float]:
    seconds, processor = [], []
    for _ in range(repeat):
        start, start_processor = time.perf_counter(), time.process_time()
        table = planner.plan(problem)
        digest = table.digest
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - start_processor)
    assert digest == table.digest
    times = model_times(table, problem.ranks, problem.costs)
    return {
        "to_bound": times.makespan / lower_bound(problem).ticks,
        "max_over_mean_busy": times.imbalance,
        "ring_tokens_to_smallest": ring_tokens(table) / max(1, smallest_ring_tokens(problem)),
        "micro_batches_of_a_rank": int(table.num_micro_batches.max()),
        "ms": statistics.median(seconds) * 1e3,
        "processor_ms": statistics.median(processor) * 1e3,
    }


def measure_seeds(num_ranks: int, seeds: int, repeat: int) -> dict[str, Any]:
    problems = [make_problem(tailed_lengths(seed), num_ranks) for seed in range(seeds)]
    check = PLANNERS["balanced"].plan(problems[0])
    check_batch_plan(check.plan(), problems[0].lengths.tolist(), [CAPACITY] * num_ranks)
    found: dict[str, Any] = {}
    for name, planner in PLANNERS.items():
        runs = [measure(planner, problem, repeat if "balanced" in name else 1) for problem in problems]
        found[name] = summary(runs)
    bounds = [lower_bound(problem) for problem in problems]
    at = 1.05 if num_ranks <= 1024 else 1.10
    found["every plan"] = {
        "bound_is_longest_sequence": sum(bound.longest >= bound.work for bound in bounds),
        f"least_ring_tokens_at_{at}": [
            round(fewest_ring_tokens(problem, at * bound.ticks) / smallest_ring_tokens(problem), 3)
            for problem, bound in zip(problems, bounds, strict=True)
        ],
    }
    step_s = statistics.median(bound.ticks for bound in bounds) * UNIT_S * LAYERS * FORWARD_AND_BACKWARD
    found["balanced"]["planning_to_step"] = found["balanced"]["ms"]["median"] / 1e3 / step_s
    return found


def summary(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    values = {key: [run[key] for run in runs] for key in runs[0]}
    return {
        key: {"median": round(statistics.median(found), 4), "worst": round(max(found), 4)}
        for key, found in values.items()
    }


def measure_public(num_ranks: int, seeds: int, verl: str | None) -> dict[str, Any]:
    """Other projects' planners by the same times and bound; their rings are powers of two or of one size."""
    found: dict[str, Any] = {}
    planners: dict[str, Callable[..., Any]] = {"megatron-core BalancedCPScheduler": megatron_times}
    if verl:
        planners["verl Karmarkar-Karp"] = verl_times
    for name, times_of in planners.items():
        runs = []
        for seed in range(seeds):
            lengths = tailed_lengths(seed)
            bound = lower_bound(make_problem(lengths, num_ranks)).ticks
            try:
                ends, seconds = times_of(lengths, num_ranks, CAPACITY, COSTS, verl)
            except Exception as problem:  # what they raise is theirs; it is reported
                runs.append({"failed": f"{type(problem).__name__}: {problem}"})
                continue
            runs.append(
                {"to_bound": max(ends) / bound, "max_over_mean": max(ends) / (sum(ends) / len(ends)), "s": seconds}
            )
        found[name] = runs
    return found


def cases(num_ranks: int) -> dict[str, NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    short = np.exp(rng.normal(7.5, 1.0, 12_000)).clip(16, CAPACITY).astype(np.int64)
    return {
        "every sequence short": short,
        "documents of 50 to 400": rng.integers(50, 400, 150_000),
        "every sequence 4K": np.full(STEP_TOKENS // (4 * KI), 4 * KI),
        "every sequence 12K": np.full(STEP_TOKENS // (12 * KI), 12 * KI),
        "every sequence 64K": np.full(STEP_TOKENS // (64 * KI), 64 * KI),
        "33 sequences of 1M": np.full(33, MI),
        "one giant sequence": np.array([2 * MI]),
        "one giant sequence, short others": np.concatenate([[2 * MI], short]),
        "more ranks than sequences": rng.integers(16, 64 * KI, num_ranks // 4),
    }


def measure_cases(num_ranks: int, repeat: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, lengths in cases(num_ranks).items():
        problem = make_problem(lengths, num_ranks)
        found[name] = {
            planner: {key: round(value, 4) for key, value in measure(PLANNERS[planner], problem, repeat).items()}
            for planner in ("balanced", "balanced, smallest rings", "naive")
        }
    short = make_problem(cases(num_ranks)["documents of 50 to 400"], num_ranks)
    found["documents of 50 to 400, none longer than 8K in the run"] = measure(
        BalancedPlanner(context=CAPACITY), short, repeat
    )
    speeds = np.where(np.arange(num_ranks) % 8 == 3, 0.7, 1.0)
    two = make_problem(tailed_lengths(0), HdpRanks.make(np.full(num_ranks, CAPACITY), speeds))
    capacities = np.where(np.arange(num_ranks) < num_ranks // 2, 2 * CAPACITY, CAPACITY)
    mixed = make_problem(tailed_lengths(0), HdpRanks.make(capacities, capacities / (2 * CAPACITY)))
    for name, problem in {"an eighth of the ranks at 0.7": two, "half the ranks half as large and fast": mixed}.items():
        found[name] = {
            planner: {key: round(value, 4) for key, value in measure(PLANNERS[planner], problem, repeat).items()}
            for planner in ("balanced", "naive")
        }
    return found


def first_calls() -> dict[str, float]:
    """Seconds of the first plan of a process, with nothing compiled and with all from the cache, imports included."""
    code = (
        "import time; start = time.perf_counter(); from tests.bench.bench_hdp_planner import *; "
        "PLANNERS['balanced'].plan(make_problem(tailed_lengths(0), 256)); print(time.perf_counter() - start)"
    )
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "NUMBA_CACHE_DIR": folder}
        runs = [
            float(
                subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
            )
            for _ in range(2)
        ]
    return {"compiling_s": runs[0], "from_cache_s": runs[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--public-seeds", type=int, default=1, help="seeds for other projects' planners, which are slow"
    )
    parser.add_argument("--verl", help="folder with verl's package, which need not be installed")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"first_plan": first_calls()}
    for num_ranks in arguments.ranks:
        report[f"{num_ranks} ranks"] = {
            **measure_seeds(num_ranks, arguments.seeds, arguments.repeat),
            "public": measure_public(num_ranks, arguments.public_seeds, arguments.verl),
            "cases": measure_cases(num_ranks, arguments.repeat),
        }
    report["load_average"] = os.getloadavg()
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""Anneal twenty placement problems of up to 64 nodes and write the best costs found, for the tests to compare with.

Each problem is annealed from a random placement and from the planner's, several times, for a number of moves that fills
the time given. The best of all is written, whoever found it. Two columns say what annealing found by itself.

    python -m tests.bench.bench_placement_annealing [--seconds 600] [--out tests/plan/data/annealed.json] [--seeds 0 1]

The file is written after each problem. Those of other seeds that it has stay, so that hours may be cut in pieces.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.plan.choose import choose_seats
from hpc_train.plan.seats import cost, find_edges, find_seats
from tests.plan.allocations import draw_problem
from tests.plan.anneal import anneal

PROBLEMS = 20
RUNS = 4
TRIAL_MOVES = 200_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="processor time for each problem")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(PROBLEMS)))
    arguments = parser.parse_args()
    found: dict[int, dict[str, Any]] = {}
    if arguments.out and arguments.out.exists():
        found = {entry["seed"]: entry for entry in json.loads(arguments.out.read_text())["problems"]}
    for seed in arguments.seeds:
        problem = draw_problem(seed, nodes=(16, 32, 64))
        seats = find_seats(problem.mesh, problem.allocation, problem.fabric)
        edges = find_edges(problem.mesh, problem.traffic, int(seats.distance.max()))
        planned = choose_seats(problem.mesh, seats, edges, problem.traffic, problem.fabric)
        anneal(seats, edges, planned, 10, seed=0)
        start = time.process_time()
        anneal(seats, edges, planned, TRIAL_MOVES, seed=0)
        moves = int(TRIAL_MOVES * arguments.seconds / RUNS / (time.process_time() - start))
        random_start = np.random.default_rng(seed).permutation(len(seats))[: len(planned)]
        starts = [random_start, random_start, planned, planned]
        costs = [anneal(seats, edges, chosen, moves, seed=run)[0] for run, chosen in enumerate(starts)]
        entry = {
            "seed": seed,
            "nodes": problem.num_nodes,
            "mesh": problem.mesh.describe(),
            "processor_s": arguments.seconds,
            "moves_a_run": moves,
            "annealed": min(costs),
            "planned": cost(seats, edges, planned),
            "planned_to_annealed": round(cost(seats, edges, planned) / min(costs), 4),
            "planned_to_annealed_from_random": round(cost(seats, edges, planned) / min(costs[:2]), 4),
        }
        found[seed] = entry
        print(json.dumps(entry), flush=True)
        if arguments.out:
            report = {"problems": [found[number] for number in sorted(found)]}
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Anneal twenty placement problems of up to 64 nodes and write the best costs found, for the tests to compare with.

The best that any of a problem's runs found is written, whoever began it.

    python -m tests.bench.bench_placement_annealing [--seconds 600] [--out tests/plan/data/annealed.json] [--seeds 0 1]

The file is written after each problem. Those of other seeds that it has stay, so that hours may be cut in pieces.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tests.plan.anneal import PROBLEMS, anneal_problem


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
        entry = anneal_problem(seed, arguments.seconds)
        found[seed] = entry
        print(json.dumps(entry), flush=True)
        if arguments.out:
            report = {"problems": [found[number] for number in sorted(found)]}
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Byte-hops of planned placements over those of known orders, on random fragmented allocations. Prints JSON.

python -m tests.bench.bench_placement_quality [--problems 200] [--each]
"""

from __future__ import annotations

import argparse
import json

from tests.plan.allocations import compare, draw_problem, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--each", action="store_true", help="print every problem too")
    arguments = parser.parse_args()
    found = [compare(draw_problem(seed)) for seed in range(arguments.problems)]
    print(json.dumps({"summary": summary(found), **({"problems": found} if arguments.each else {})}, indent=1))


if __name__ == "__main__":
    main()

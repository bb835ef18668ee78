"""What the plan of a step's actions costs one rank: time of a processor and memory, for steps of many micro-batches.

    python -m tests.bench.bench_schedule_plan

Each case in a process of its own, without Python's garbage collector, as in a run's steps. Prints a line of JSON each:
the actions of the rank's list, seconds, and by how many bytes the process's largest size grew.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import time

from hpc_train.plan.schedule_collectives import plan_training

CASES = (
    ("1f1b", 1, 50_000, 1, 0),
    ("1f1b", 4, 50_000, 1, 1),
    ("1f1b", 4, 50_000, 2, 1),
    ("zero_bubble", 4, 50_000, 1, 1),
    ("1f1b", 4, 256, 1, 1),
    ("zero_bubble", 64, 512, 2, 31),
)
"""Schedule, stages, micro-batches, virtual stages, and the rank's stage."""


def main() -> None:
    if len(sys.argv) == 1:
        for case in CASES:
            subprocess.run([sys.executable, "-m", "tests.bench.bench_schedule_plan", *map(str, case)], check=True)
        return
    kind = sys.argv[1]
    num_stages, num_micro_batches, virtual_stages, stage = map(int, sys.argv[2:])
    gc.disable()
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    actions = plan_training(kind, num_stages, num_micro_batches, virtual_stages).actions[stage]  # type: ignore[arg-type]
    figures = {
        "case": sys.argv[1:],
        "actions": len(actions),
        "cpu_s": round(time.process_time() - begin, 3),
        "bytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

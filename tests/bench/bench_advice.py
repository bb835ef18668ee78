"""What refusals of drawn runs with several faults at once advise: how many name no change, whether what they name
passes, how many settings it has, and what a refusal takes. Prints JSON.

    python -m tests.bench.bench_advice --refusals 2450 --seed 1
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter

import numpy as np

from hpc_train.config_read import load_config
from hpc_train.errors import ConfigError
from hpc_train.launch.checks import check_plan
from tests.plan.drawn_shapes import Shape, advised, drawn_shapes, followed


def refusal(shape: Shape) -> str | None:
    try:
        check_plan(load_config("tiny", shape.words), shape.allocation, None)
    except ConfigError as refused:
        return str(refused)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refusals", type=int, default=2450)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    num_settings: Counter[int] = Counter()
    cpu_s = []
    for shape in drawn_shapes(asked.seed):
        if counts["refused"] == asked.refusals:
            break
        try:
            config = load_config("tiny", shape.words)
        except ConfigError:
            counts["refused by a section of the configuration, not counted"] += 1
            continue
        begin = time.process_time()
        try:
            check_plan(config, shape.allocation, None)
            continue
        except ConfigError as refused:
            told = str(refused)
        cpu_s.append(time.process_time() - begin)
        counts["refused"] += 1
        changes = advised(told)
        if not changes:
            limit = "with" if config.fabric.gpu_memory_bytes else "without"
            counts[f"that name no change, {limit} fabric.gpu_memory_bytes"] += 1
            continue
        num_settings[len(changes[0].settings) + (changes[0].num_ranks is not None)] += 1
        counts["changes named"] += len(changes)
        counts["changes named that are refused"] += sum(refusal(followed(shape, each)) is not None for each in changes)
    shares = {f"p{share}": round(float(np.percentile(cpu_s, share)), 3) for share in (50, 90, 99, 100)}
    settings = {str(number): num_settings[number] for number in sorted(num_settings)}
    print(json.dumps({**counts, "settings of the first change": settings, "cpu_s of a refusal": shares}, indent=1))


if __name__ == "__main__":
    main()

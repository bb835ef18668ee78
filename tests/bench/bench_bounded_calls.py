"""What it costs that calls of a store are waited for within a bound: each is made by another thread.

A look at a folder; and a checkpoint of one process in a folder in memory, written and verified, with and without a
bound in turn. Prints JSON: microseconds a call, and ratios of one round (median, least, most).

    python -m tests.bench.bench_bounded_calls [--mib 512] [--rounds 15] [--folder /dev/shm]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

import torch

from hpc_train.checkpoint.folders.verify import verify
from hpc_train.checkpoint.format.state import StatePiece
from hpc_train.checkpoint.saving.save import write_alone
from hpc_train.checkpoint.stores.caller import Bound
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.plan.flat import Box

NUM_LOOKS, TENSOR_MIB = 1000, 16


def _look_us(place: Location) -> float:
    begin = time.perf_counter()
    for _ in range(NUM_LOOKS):
        place.entry()
    return (time.perf_counter() - begin) / NUM_LOOKS * 1e6


def _write_and_verify(folder: Location, pieces: list[StatePiece]) -> tuple[float, float]:
    folder.make_folder()
    begin = time.perf_counter()
    write_alone(folder, 1, pieces, {})
    written = time.perf_counter()
    assert list(verify(folder)) == []
    end = time.perf_counter()
    folder.remove()
    return written - begin, end - written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", default="/dev/shm")
    options = parser.parse_args()
    whole = Box((0, 0), (4096, 1024))
    count = max(1, options.mib // TENSOR_MIB)
    pieces = [StatePiece(f"model.{number}", whole.sizes, whole, torch.rand(whole.sizes)) for number in range(count)]
    looks: dict[str, list[float]] = {"direct": [], "bounded": []}
    ratios: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        direct = locate(folder)
        places = {"direct": direct, "bounded": direct.within(Bound(720.0))}
        for number in range(options.rounds):
            order = list(places.items())[:: 1 if number % 2 else -1]
            seconds = {}
            for name, place in order:
                looks[name].append(_look_us(place))
                seconds[name] = _write_and_verify(place / name, pieces)
            write, check = (bound / free for bound, free in zip(seconds["bounded"], seconds["direct"], strict=True))
            ratios.append((write, check))
    told = {
        "look_us": {name: round(statistics.median(times), 1) for name, times in looks.items()},
        **{name: _spread([ratio[at] for ratio in ratios]) for at, name in enumerate(("write", "verify"))},
    }
    print(json.dumps(told))


def _spread(values: list[float]) -> list[float]:
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


if __name__ == "__main__":
    main()

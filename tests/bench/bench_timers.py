"""What timing costs a step, at 100 segments a step or more.

1. steps of a small model on one rank, with a recorder and without in turn: the ratio of paired medians, beside that of
   a second model without one, which shows how far two equal ones are apart. So this can only refute.
2. segments alone, 100 a step, half of them transfers, with the thread writing them: time of one, against the step's.

The second is the figure: segments x time of one / step time. Prints JSON.

    python -m tests.bench.bench_timers [--rounds 5] [--segments 100]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpc_train.config import ObserveConfig
from hpc_train.record import NOT_RECORDED, Kind, Recorder
from hpc_train.train.build import build_trainer
from hpc_train.train.recording import start_recorder
from tests.bench.rounds import MODEL, SEQ_LEN, batches_of
from tests.train.trainers import make_config, mesh_of
from tests.worlds import single_world

_STEPS = 200
_TOKENS = 64


def segment_s(recorder: Recorder, num_segments: int) -> float:
    """Time of one of a step's segments, the step's own hand-over to the writing thread included."""
    start = time.perf_counter()
    for step in range(1, _STEPS + 1):
        with recorder.step(step):
            for number in range(num_segments // 2):
                sent = recorder.communication(Kind.SEND, "send", "pp", (0, 1), 4096, 1)
                with recorder.segment("forward", micro_batch=number, model_chunk=0):
                    pass
                sent.begin_wait()
                sent.end()
    return (time.perf_counter() - start) / (_STEPS * num_segments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--segments", type=int, default=100, help="of a step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), args.rounds, args.segments), indent=1))


def measure(folder: Path, rounds: int, num_segments: int) -> dict[str, Any]:
    world = single_world()
    observe = ObserveConfig(trace_max_segments=10**9)
    config = make_config(MODEL, seq_len=SEQ_LEN)
    recorders = {"off": NOT_RECORDED, "on": start_recorder(folder, observe, world), "off_again": NOT_RECORDED}
    trainers = {
        name: build_trainer(config, mesh_of(config, 1), world, recorder=recorder)
        for name, recorder in recorders.items()
    }
    # A forward and a backward each, so half as many micro-batches as segments, each short: the hardest case.
    (whole_batch,) = batches_of(1, 1)
    tensors = {name: getattr(whole_batch, name)[:, :_TOKENS] for name in ("tokens", "labels", "positions")}
    short = replace(whole_batch, **tensors, boundaries=((_TOKENS,),), num_tokens=_TOKENS, num_supervised=_TOKENS)
    batches = [short] * (num_segments // 2)
    step_s: dict[str, list[float]] = {name: [] for name in recorders}
    processor_s: dict[str, list[float]] = {name: [] for name in recorders}
    for number in range(rounds + 1):
        for name in list(recorders)[:: -1 if number % 2 else 1]:
            start, start_processor = time.perf_counter(), time.process_time()
            with recorders[name].step(number + 1):
                trainers[name].step(number + 1, batches, 1e-4)
            step_s[name].append(time.perf_counter() - start)
            processor_s[name].append(time.process_time() - start_processor)
    recorders["on"].close()
    of_one: dict[str, list[float]] = {"off": [], "on": []}
    for number in range(rounds):
        recorder = start_recorder(folder / str(number), observe, world)
        of_one["on"].append(segment_s(recorder, num_segments))
        of_one["off"].append(segment_s(NOT_RECORDED, num_segments))
        recorder.close()
    ratios = {name: _paired(step_s[name], step_s["off"]) for name in ("on", "off_again")}
    processor = {name: _paired(processor_s[name], processor_s["off"]) for name in ("on", "off_again")}
    whole, one = statistics.median(step_s["off"][1:]), statistics.median(of_one["on"])
    return {
        "what": "share of a step's time that its segments cost; medians",
        "segments_a_step": num_segments,
        "load_average": os.getloadavg(),
        "step_s": whole,
        "segment_us": 1e6 * one,
        "segment_us_range": (1e6 * min(of_one["on"]), 1e6 * max(of_one["on"])),
        "segment_us_not_recorded": 1e6 * statistics.median(of_one["off"]),
        "share_of_step": num_segments * one / whole,
        "step_s_for_one_percent": 100 * num_segments * one,
        "steps_to_off": ratios,
        "processor_to_off": processor,
    }


def _paired(times: list[float], of_off: list[float]) -> tuple[float, float, float]:
    """Median, least and greatest ratio of a round; the first one warms up."""
    ratios = [ours / off for ours, off in zip(times[1:], of_off[1:], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


if __name__ == "__main__":
    main()

"""Start of a rank's recorder: which attempt of the run it is, how far nodes' clocks are apart, where the file goes."""

from __future__ import annotations

import json
from pathlib import Path

from hpc_train.comm.clock_offsets import ClockOffset, measure_clock_offsets
from hpc_train.comm.world import World
from hpc_train.config import ObserveConfig
from hpc_train.log import warn
from hpc_train.plan.run_files import write_atomically
from hpc_train.record import (
    CLOCK_FILE,
    NOT_RECORDED,
    TRACE_FOLDER,
    Clock,
    HostClock,
    Recorder,
    attempt_folder,
    attempts_in,
    rank_trace_file,
)


def start_recorder(run_dir: Path, observe: ObserveConfig, world: World) -> Recorder:
    """What times this rank's segments; nothing if observe.trace is off. Collective over all ranks."""
    if not observe.trace:
        return NOT_RECORDED
    from hpc_train.train.trace import TraceRecorder

    folder = run_dir / TRACE_FOLDER
    attempt = world.control.broadcast(1 + max(attempts_in(folder), default=0) if world.rank == 0 else None)
    folder = folder / attempt_folder(attempt)
    offsets = measure_clock_offsets(world)
    if world.rank == 0:
        _write_offsets(folder, offsets)
    facts = {"rank": world.rank, "node": world.node, "node_rank": world.node_rank, "world_size": world.world_size}
    return TraceRecorder(
        folder / rank_trace_file(world.rank),
        facts,
        _clock(world),
        max_rows=observe.trace_max_segments,
        steps=observe.trace_steps,
    )


def _clock(world: World) -> Clock:
    if world.device.type != "cuda":
        return HostClock()
    from hpc_train.train.cuda_clock import CudaClock

    return CudaClock(world.device)


def _write_offsets(folder: Path, offsets: dict[int, ClockOffset]) -> None:
    nodes = {str(node): {"offset_ns": one.offset_ns, "error_ns": one.error_ns} for node, one in offsets.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / CLOCK_FILE, json.dumps({"reference_node": 0, "nodes": nodes}, indent=1) + "\n")
    except OSError as error:
        warn(f"{folder / CLOCK_FILE} cannot be written: {error}; a trace of several nodes will not be aligned")

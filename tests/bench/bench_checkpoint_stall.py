"""How long training waits for a save, and when the save is durable: node agents against torch's own checkpoints.

State of --mib in all, fp32, in tensors of 4 MiB, over --ranks processes of this machine, one thread each. A round,
whose parts come in turn and begin together on all ranks:

    copy          the state into a buffer that is kept: the least that a snapshot can cost
    stall         a save by the agent: until training may go on; durable: until it is committed
    async_stall   torch.distributed.checkpoint.async_save, with a FileSystemWriter that syncs: until it returns
    dcp           torch.distributed.checkpoint.save with the same writer: until it returns

Timed is from the first rank's begin to the last one's end: training goes on when all ranks can, and where there are
more ranks than cores some have done their copy before others begin. Ratios are of one round, and their median over
rounds. The first round warms up and is printed apart. `largest_growth_mib`: the most that anonymous and shared memory
of a rank or of the agent grew by during a warm save of the agent that is not timed, seen every 5 ms (/proc/PID/status,
RssAnon and RssShmem).

Prints JSON.

    python -m tests.bench.bench_checkpoint_stall [--mib 1024] [--ranks 4] [--rounds 5] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.node_agents import agent_process
from tests.ranks import TestRank, run_ranks

_TENSOR_ELEMENTS = 1 << 20
"""4 MiB each, and a matrix: as those of a model of some billion parameters over thousands of ranks."""

_PAUSE_S = 0.3
"""Behind each part: an agent removes the checkpoint before beside what follows on a save."""


Times = dict[str, tuple[float, float]]
"""When each part began and ended, on the clock of time.perf_counter, which the processes of a machine share."""


def rank_main(
    me: TestRank, folder: str, key: str, agent_pid: int, mib: int, rounds: int
) -> tuple[list[Times], list[int]]:
    """On each rank, the times of each round's parts, and the most bytes that the memory grew by in each round."""
    import torch
    import torch.distributed.checkpoint as dcp

    from hpc_train.checkpoint.format.state import StatePiece
    from hpc_train.checkpoint.saving.agent_saves import AgentSaves
    from hpc_train.checkpoint.saving.shared_memory import AgentTarget
    from hpc_train.checkpoint.stores.location import locate
    from hpc_train.plan.flat import Box
    from tests.worlds import make_world

    count = mib * (1 << 18) // me.world_size // _TENSOR_ELEMENTS
    flat = torch.rand(count * _TENSOR_ELEMENTS)
    rows = _TENSOR_ELEMENTS // 1024
    pieces = []
    for number, data in enumerate(flat.split(_TENSOR_ELEMENTS)):
        name = f"model.{me.rank}.{number}"
        pieces.append(StatePiece(name, (rows, 1024), Box((0, 0), (rows, 1024)), data))
    state = {piece.name: piece.tensor() for piece in pieces}
    kept = torch.empty_like(flat)
    kept.fill_(1.0)
    world, root = make_world(me), Path(folder)
    target = AgentTarget(locate(root / "agent"), 1, None, 600.0, None)
    saves = AgentSaves(world, (key, "n1"), target, pieces, lambda saved: None)

    def writer(name: str) -> Any:
        return dcp.FileSystemWriter(root / name, single_file_per_rank=True, sync_files=True, overwrite=True)

    most_grown: list[int] = []
    clock = time.perf_counter

    def copy(number: int) -> Times:
        begin = clock()
        kept.copy_(flat)
        return {"copy": (begin, clock())}

    def agent(number: int) -> Times:
        begin = clock()
        assert saves.save(2 * number + 1, pieces, {}, "wait")
        goes_on = clock()
        saves.settle()
        return {"stall": (begin, goes_on), "durable": (begin, clock())}

    def growth(number: int) -> Times:
        with _growth([os.getpid(), *([agent_pid] if me.rank == 0 else [])]) as grown:
            assert saves.save(2 * number + 2, pieces, {}, "wait")
            saves.settle()
        most_grown.append(max(grown))
        return {}

    def asynchronous(number: int) -> Times:
        begin = clock()
        future = dcp.async_save(state, storage_writer=writer(f"async-{number}"))
        goes_on = clock()
        future.result()
        return {"async_stall": (begin, goes_on)}

    def synchronous(number: int) -> Times:
        begin = clock()
        dcp.save(state, storage_writer=writer(f"dcp-{number}"))
        return {"dcp": (begin, clock())}

    parts: list[Callable[[int], Times]] = [copy, agent, growth, asynchronous, synchronous]
    found = []
    for number in range(rounds + 1):
        times: Times = {}
        for part in parts[number % len(parts) :] + parts[: number % len(parts)]:
            world.control.barrier()
            times |= part(number)
            world.control.barrier()
            if me.rank == 0:
                for path in [*root.glob("async-*"), *root.glob("dcp-*")]:
                    shutil.rmtree(path)
                time.sleep(_PAUSE_S)
                os.sync()  # what one part has written is not left for the next one to wait for
        found.append(times)
    saves.close()
    return found, most_grown


@contextmanager
def _growth(pids: list[int]) -> Iterator[list[int]]:
    """By how many bytes each of these processes grows at most until the block ends."""
    first = [_memory_bytes(pid) for pid in pids]
    grown = [0] * len(pids)
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.005):
            for index, pid in enumerate(pids):
                grown[index] = max(grown[index], _memory_bytes(pid) - first[index])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield grown
    finally:
        is_over.set()
        thread.join()


def _memory_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) * 1024


def report(of_ranks: list[tuple[list[Times], list[int]]], settings: dict[str, Any]) -> dict[str, Any]:
    """What is printed; of_ranks: what each rank returned."""
    rounds = [_seconds(list(of_round)) for of_round in zip(*(times for times, _ in of_ranks), strict=True)]
    warm = rounds[1:]
    pairs = [("stall", "copy"), ("stall", "async_stall"), ("durable", "dcp")]
    ratios = {f"{ours} / {theirs}": [found[ours] / found[theirs] for found in warm] for ours, theirs in pairs}
    return {
        "what": "seconds of all ranks together, medians of warm rounds; ratios within a round",
        "settings": settings,
        "load_average": os.getloadavg(),
        "seconds": {name: statistics.median(found[name] for found in warm) for name in warm[0]},
        "first_round_seconds": rounds[0],
        "ratio": {pair: statistics.median(values) for pair, values in ratios.items()},
        "ratio_range": {pair: (min(values), max(values)) for pair, values in ratios.items()},
        "largest_growth_mib": max(max(grown[1:]) for _, grown in of_ranks) / 2**20,
    }


def _seconds(of_ranks: list[Times]) -> dict[str, float]:
    """From the first rank's begin to the last one's end, of each part of a round."""
    ends = {name: [times[name] for times in of_ranks] for name in of_ranks[0]}
    return {name: max(end for _, end in spans) - min(begin for begin, _ in spans) for name, spans in ends.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where checkpoints go (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stall-", dir=options.folder) as name:
        with agent_process(Path(name) / "run") as agent:
            arguments = (name, agent.key, agent.process.pid, options.mib, options.rounds)
            found = run_ranks(rank_main, options.ranks, *arguments, timeout_s=1800)
            agent.end()
    print(json.dumps(report(found, vars(options)), indent=1))


if __name__ == "__main__":
    main()

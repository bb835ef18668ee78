"""What copies on the nodes' own disks cost training, and what a restart takes with them and from the store alone.

State of --mib in all, fp32, over two ranks, each with a node agent and a disk folder of its own, as two nodes of one
machine would be; store and disks lie on the same file system. Agents write to the store at --store-mib-per-s each, as
to one that is shared by many nodes; disks and loading are not slowed. A round, whose parts begin together:

    save           to the store: `stall` until training may go on, `durable` until it is committed
    copy           to the disks alone: `stall`, and `whole` until both parts lie on both disks
    save_at_once   to the store, begun while a copy is on its way: `stall` with the copy that has to make room

At the end the newest is loaded, from the disks (`from_disks`) and from the store (`from_store`), from warm page caches.
Figures are those of the slower rank, medians of rounds behind the first.

Prints JSON.

    python -m tests.bench.bench_local_copies [--mib 512] [--rounds 5] [--store-mib-per-s 50] [--folder FOLDER]
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

from tests.node_agents import agent_process
from tests.ranks import TestRank, run_ranks

_TENSOR_ELEMENTS = 1 << 20


def rank_main(
    me: TestRank, folder: str, key: str, mib: int, rounds: int, store_bytes_per_s: float
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """On each rank, the seconds of each round's parts, and of the loads at the end."""
    import torch

    from hpc_train.checkpoint.copies.lineage import Lineage, note_lineage
    from hpc_train.checkpoint.copies.local_folder import folder_of_run
    from hpc_train.checkpoint.copies.local_parts import PartName
    from hpc_train.checkpoint.copies.local_saves import LocalCopies, LocalFolder
    from hpc_train.checkpoint.folders.attempt import attempt_of
    from hpc_train.checkpoint.format.state import StatePiece
    from hpc_train.checkpoint.loading.load import load_newest
    from hpc_train.checkpoint.saving.agent_saves import AgentSaves
    from hpc_train.checkpoint.saving.shared_memory import AgentTarget
    from hpc_train.checkpoint.stores.location import locate
    from hpc_train.config import LocalCopiesConfig
    from hpc_train.plan.flat import Box
    from tests.worlds import make_world

    count, rows = mib * (1 << 18) // me.world_size // _TENSOR_ELEMENTS, _TENSOR_ELEMENTS // 1024
    flat = torch.rand(count * _TENSOR_ELEMENTS)
    pieces = [
        StatePiece(f"model.{me.rank}.{number}", (rows, 1024), Box((0, 0), (rows, 1024)), data)
        for number, data in enumerate(flat.split(_TENSOR_ELEMENTS))
    ]
    base = Path(folder)
    root, disks = locate(base / "store"), [folder_of_run(str(base / f"disk{node}"), base, {}) for node in range(2)]
    world = replace(
        make_world(me), node=f"n{me.rank}", node_rank=me.rank, num_nodes=2, local_rank=0, local_world_size=1
    )
    mine = LocalFolder(disks[me.rank], attempt_of(key))
    copies = LocalCopies(world, LocalCopiesConfig(path="/", every=1), mine, [1, 0], lambda: "127.0.0.1", 60.0)
    saves = AgentSaves(
        world, (key, world.node), AgentTarget(root, 1, store_bytes_per_s, 600.0, None), pieces, lambda saved: None
    )
    saves.open_copies(copies)
    if me.rank == 0:
        note_lineage(root, Lineage(mine.attempt))

    def begin_save(step: int, *, is_copy: bool) -> float:
        world.control.barrier()
        begin = time.perf_counter()
        how: Any = {"is_for_store": False, "has_copy": True} if is_copy else {}
        while not saves.save(step, pieces, {"num_updates": step}, "skip", **how):
            time.sleep(0.01)
        return time.perf_counter() - begin

    def wait_for_parts(step: int) -> float:
        begin = time.perf_counter()
        while not all(_has_parts(disk, step, PartName.of_folder) for disk in disks):
            time.sleep(0.002)
        return time.perf_counter() - begin

    found = []
    for number in range(rounds + 1):
        seconds, step = {}, 10 * number
        seconds["save_stall"] = begin_save(step + 1, is_copy=False)
        begin = time.perf_counter()
        saves.settle()
        seconds["save_durable"] = seconds["save_stall"] + time.perf_counter() - begin
        seconds["copy_stall"] = begin_save(step + 2, is_copy=True)
        seconds["copy_whole"] = seconds["copy_stall"] + wait_for_parts(step + 2)
        begin_save(step + 3, is_copy=True)
        seconds["save_at_once_stall"] = begin_save(step + 4, is_copy=False)
        saves.settle()
        found.append(seconds)
    begin_save(10 * rounds + 5, is_copy=True)
    wait_for_parts(10 * rounds + 5)
    loads = {}
    for name, local in (("from_disks", mine), ("from_store", None)):
        world.control.barrier()
        begin = time.perf_counter()
        loaded = load_newest(root, pieces, world, local)
        loads[name] = time.perf_counter() - begin
        assert loaded is not None and loaded.step == 10 * rounds + (5 if local else 4), loaded
    saves.close()
    return found, loads


def _has_parts(disk: Path, step: int, name_of: Any) -> bool:
    names = [name_of(path.name) for path in disk.iterdir()]
    return sum(name is not None and name.step == step for name in names) == 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store-mib-per-s", type=float, default=50.0)
    parser.add_argument("--folder", help="where store and disks are (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="copies-", dir=options.folder) as name:
        for node in range(2):
            (Path(name) / f"disk{node}").mkdir()
        with agent_process(Path(name) / "run", "n0") as first, agent_process(Path(name) / "run", "n1", first.key):
            arguments = (name, first.key, options.mib, options.rounds, options.store_mib_per_s * 2**20)
            of_ranks = run_ranks(rank_main, 2, *arguments, timeout_s=1800)
    warm = [of_round[1:] for of_round, _ in of_ranks]
    slowest = [{name: max(found[name] for found in both) for name in both[0]} for both in zip(*warm, strict=True)]
    told = {
        "what": "seconds of the slower rank, medians of warm rounds, and their range",
        "settings": vars(options),
        "load_average": os.getloadavg(),
        "seconds": {name: statistics.median(found[name] for found in slowest) for name in slowest[0]},
        "range": {name: [min(f[name] for f in slowest), max(f[name] for f in slowest)] for name in slowest[0]},
        "load_seconds": {name: max(loads[name] for _, loads in of_ranks) for name in of_ranks[0][1]},
    }
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()

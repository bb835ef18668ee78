"""Ranks that save one step after another, killed at random moments; what a resume would find after each kill."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from hpc_train.checkpoint.folders.folder import steps_newest_first
from hpc_train.checkpoint.stores.location import locate
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.processes import die_with_parent
from tests.ranks import TestRank, _context, _server_environment


def kill_in_saves(place: str, times: int, *, seed: int, num_elements: int, world_size: int = 1) -> list[int]:
    """Start, kill one rank and then the others, and load, `times` times; the newest step after each, 0 for none.

    A load that finds a number that is not that step's, or less than was there before, is an AssertionError.
    """
    chance, found = random.Random(seed), [0]
    for _ in range(times):
        folder = tempfile.mkdtemp(prefix="kills-")
        members = []
        for rank in range(world_size):
            arguments = (place, found[-1] + 1, num_elements, rank, world_size, f"{folder}/store")
            members.append(_context.Process(target=_save_until_killed, args=arguments))
            with _server_environment():
                members[-1].start()
        wait_for_moment(Path(folder) / "marks", chance)
        for member in chance.sample(members, len(members)):
            end(member.pid or 0)
            time.sleep(0.05 * chance.random())
        for member in members:
            member.join()
        step = plain_state.load(Alone(), place, num_elements)
        assert step is not None or not list(steps_newest_first(locate(place)))
        assert (step or 0) >= found[-1], f"step {found[-1]} was there, and now {step} is the newest"
        found.append(step or 0)
        for path in Path(folder).iterdir():
            path.unlink()
        os.rmdir(folder)
    return found[1:]


def end(pid: int) -> None:
    """Kill it; one that has lost another rank may have ended by itself."""
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for_moment(marks: Path, chance: random.Random) -> None:
    """Until a random part of a save that follows on a random number of saves: by the ranks' marks, not by a clock."""
    wanted, last_mark = 1 + chance.randrange(3), time.monotonic()
    deadline, seen, took_s = last_mark + 60, 0, 0.5
    while seen < wanted:
        assert time.monotonic() < deadline, f"{seen} marks after 60 s"
        time.sleep(0.005)
        count = marks.stat().st_size if marks.exists() else 0
        if count > seen:
            now = time.monotonic()
            took_s = (now - last_mark) / (count - seen) if seen else took_s
            seen, last_mark = count, now
    time.sleep(took_s * chance.random())


def _save_until_killed(place: str, first: int, num_elements: int, rank: int, world_size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    die_with_parent()
    torch.set_num_threads(1)
    me = TestRank(rank, world_size, "gloo", timedelta(seconds=30))
    if world_size > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=me.group_timeout
        )
    with open(Path(store).with_name("marks"), "ab", buffering=0) as marks:
        marks.write(b"." * (rank == 0))  # ready, and then one for each save
        for step in range(first, first + 10_000):
            plain_state.save(me, place, step, num_elements, keep=2)
            marks.write(b"." * (rank == 0))

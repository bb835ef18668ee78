"""Ranks that save one step after another through a node agent; killed: one of them, the agent, or everything.

After each kill the newest checkpoint is loaded and compared, and it is no older than what was promised.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from hpc_train.checkpoint.folders.folder import steps_newest_first
from hpc_train.checkpoint.stores.location import locate
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.checkpoint.saving.kills import end, wait_for_moment
from tests.node_agents import AgentProcess, agent_process
from tests.processes import die_with_parent
from tests.ranks import TestRank, _context, _server_environment

KINDS = ("rank", "agent", "everything")


@dataclass
class Found:
    """steps: the newest after each kill. rescued: kills of a rank after which the agent completed a further save."""

    steps: list[int] = field(default_factory=lambda: [0])
    kinds: Counter[str] = field(default_factory=Counter)
    rescued: int = 0


def kill_around_agents(
    place: str, times: int, *, seed: int, num_elements: int, world_size: int, kinds: Sequence[str] = KINDS
) -> Found:
    """Start agent and ranks, kill, and load, `times` times.

    Promised: when a rank dies, the agent commits the last step that all ranks have copied; when all die, or the agent,
    the step before that is there, since a save begins when the one before is committed.
    """
    chance, found = random.Random(seed), Found()
    for number in range(times):
        kind = kinds[number % len(kinds)]
        with tempfile.TemporaryDirectory(prefix="kills-") as name:
            copied, before = _one_round(place, kind, chance, Path(name), found.steps[-1] + 1, num_elements, world_size)
        step = plain_state.load(Alone(), place, num_elements) or 0
        promised = copied if kind == "rank" else copied - 1
        assert step >= found.steps[-1], f"step {found.steps[-1]} was there, and now {step} is the newest"
        assert step >= promised, f"{kind} killed: all ranks had copied step {copied}, and {step} is the newest"
        found.rescued += kind == "rank" and step > before
        found.steps.append(step)
        found.kinds[kind] += 1
    return found


def _one_round(
    place: str, kind: str, chance: random.Random, folder: Path, first: int, num_elements: int, world_size: int
) -> tuple[int, int]:
    """The last step that all ranks had copied when something was killed, and the newest that was committed then."""
    marks = [folder / f"marks-{rank}" for rank in range(world_size)]
    with agent_process(folder) as agent:
        members = []
        for rank in range(world_size):
            arguments = (place, first, num_elements, rank, world_size, f"{folder}/store", agent.key)
            members.append(_context.Process(target=_save_until_killed, args=arguments))
            with _server_environment():
                members[-1].start()
        try:
            wait_for_moment(marks[0], chance)
            pids = [member.pid or 0 for member in members]
            _kill(kind, chance, agent, pids)
            before = next((step for step, _ in steps_newest_first(locate(place))), 0)
            if kind == "agent":
                # The ranks notice it at their next save, and go on by themselves.
                _wait_for_more(marks[0])
            for pid in pids:
                end(pid)
        finally:
            for member in members:
                end(member.pid or 0)
                member.join()
        if kind == "rank":
            agent.end()
    # A mark before the first step says that a rank is ready.
    return first - 2 + min(path.stat().st_size if path.exists() else 0 for path in marks), before


def _kill(kind: str, chance: random.Random, agent: AgentProcess, pids: list[int]) -> None:
    if kind == "rank":
        end(chance.choice(pids))
        time.sleep(0.05 * chance.random())
    elif kind == "agent":
        agent.process.kill()
    else:
        for pid in chance.sample([*pids, agent.process.pid], len(pids) + 1):
            end(pid)


def _wait_for_more(marks: Path) -> None:
    """Until two further saves are marked: one may have been copied into the agent that is no more."""
    count, deadline = marks.stat().st_size, time.monotonic() + 60
    while marks.stat().st_size < count + 2:
        assert time.monotonic() < deadline, "the ranks do not save by themselves"
        time.sleep(0.005)


def _save_until_killed(
    place: str, first: int, num_elements: int, rank: int, world_size: int, store: str, key: str
) -> None:
    import torch
    import torch.distributed as dist

    from hpc_train.checkpoint.folders.attempt import ATTEMPT_VALUE
    from hpc_train.checkpoint.saving.saver import Saver
    from hpc_train.config import CheckpointConfig
    from tests.worlds import make_world

    die_with_parent()
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    me = TestRank(rank, world_size, "gloo", timedelta(seconds=30))
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=me.group_timeout
    )
    root = locate(place)
    saver = Saver(CheckpointConfig(keep=2), root, Path(store).parent, make_world(me), (key, "n1"), lambda seconds: None)
    state = plain_state.state(me, None, num_elements)
    saver.open(state)
    with open(Path(store).with_name(f"marks-{rank}"), "ab", buffering=0) as marks:
        marks.write(b".")  # ready, and then one for each save
        for step in range(first, first + 10_000):
            for piece, wanted in zip(state, plain_state.state(me, step, num_elements), strict=True):
                piece.data.copy_(wanted.data)
            # A step that an agent has committed as it died is saved again by the ranks, and takes its place.
            saver.save(step, state, {"num_updates": step, ATTEMPT_VALUE: key}, must_last=False)
            marks.write(b".")

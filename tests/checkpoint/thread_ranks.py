"""Ranks that are threads of the test, and node agents beside them: cheap, and what they call can be replaced."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.format.state import StatePiece
from hpc_train.checkpoint.saving.node_writer import CheckpointService
from hpc_train.checkpoint.saving.saver import Saver
from hpc_train.checkpoint.stores.location import locate
from hpc_train.cluster.agent_address import ask_agent
from hpc_train.cluster.agent_service import Peer, Service
from hpc_train.cluster.agent_wait import USUAL_LIMITS, AgentLimits
from hpc_train.comm.control import Control
from hpc_train.comm.world import World
from hpc_train.config import CheckpointConfig
from tests.agents import served
from tests.checkpoint import plain_state
from tests.worlds import single_world

ELEMENTS = 1 << 13
_LIMIT_S = 60.0


@dataclass
class _Meeting:
    """Where the ranks of a test exchange values. longest: bytes of the longest value that all ranks were sent."""

    size: int
    longest: int = 0

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=_LIMIT_S)
        self.values: list[str] = [""] * self.size


class ThreadControl(Control):
    """The channel of a rank that is a thread."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def all_gather(self, value: Any) -> list[Any]:
        texts = self._exchange(value)
        self._meeting.longest = max(self._meeting.longest, *map(len, texts))
        return [json.loads(text) for text in texts]

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        texts = self._exchange(value)
        return [json.loads(text) for text in texts] if self.rank == root else None

    def _exchange(self, value: Any) -> list[str]:
        meeting = self._meeting
        meeting.values[self.rank] = json.dumps(value)
        meeting.barrier.wait()
        texts = list(meeting.values)
        meeting.barrier.wait()
        return texts


@dataclass
class ThreadRank:
    """A rank alone on its node n1, n2, ..., or all ranks on n1.

    durations: of saves that were reported to it. savers: closed at its end.
    """

    rank: int
    world_size: int
    world: World
    state: list[StatePiece] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    savers: list[Saver] = field(default_factory=list)

    def saver(self, root: Path, key: str, *, limits: AgentLimits = USUAL_LIMITS, **config: Any) -> Saver:
        self.state = plain_state.state(self, None, ELEMENTS)  # type: ignore[arg-type]

        def note(seconds: float) -> None:
            self.durations.append(seconds)

        agent = (key, self.world.node)
        place = locate(root)
        self.savers.append(
            Saver(CheckpointConfig(**config), place, root.parent, self.world, agent, note, limits=limits)
        )
        return self.savers[-1]

    def save(self, saver: Saver, step: int, *, must_last: bool = False) -> bool:
        wanted = plain_state.state(self, step, ELEMENTS)  # type: ignore[arg-type]
        for piece, new in zip(self.state, wanted, strict=True):
            piece.data.copy_(new.data)
        return saver.save(step, self.state, {"num_updates": step}, must_last=must_last)


def run_threads(fn: Callable[[ThreadRank], Any], size: int, *, one_node: bool = False) -> tuple[list[Any], int]:
    """Call `fn(rank)` in a thread for each rank; their results, and the bytes of the longest value that all were sent.

    The first exception is raised again when all have ended.
    """
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    problems: list[BaseException] = []

    def run(number: int) -> None:
        world = replace(
            single_world(), rank=number, world_size=size, control=ThreadControl(number, meeting),
            node="n1" if one_node else f"n{number + 1}", node_rank=0 if one_node else number,
            num_nodes=1 if one_node else size, local_rank=number if one_node else 0,
            local_world_size=size if one_node else 1,
        )  # fmt: skip
        rank = ThreadRank(number, size, world)
        try:
            results[number] = fn(rank)
        except BaseException as problem:
            if not isinstance(problem, threading.BrokenBarrierError):
                problems.append(problem)
            meeting.barrier.abort()
        finally:
            for saver in rank.savers:
                saver.close()

    threads = [threading.Thread(target=run, args=(number,), name=f"rank {number}") for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return results, meeting.longest


class Ending(Service):
    """`{"say": "stop"}` ends the agent, as the driver does."""

    name = "stop"

    def __init__(self) -> None:
        self.end: Callable[[], None] = lambda: None

    def answer(self, peer: Peer, message: Mapping[str, Any], descriptors: Sequence[int]) -> Mapping[str, Any]:
        self.end()
        return {"ok": True}

    def gone(self, peer: Peer) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def agents(num_nodes: int) -> Iterator[str]:
    """Agents of nodes n1, n2, ... that write checkpoints and can be told to end; their key."""
    with ExitStack() as stack:
        key: str | None = None
        for number in range(1, num_nodes + 1):
            ending = Ending()
            agent = stack.enter_context(served([CheckpointService(print), ending], key, node=f"n{number}"))
            key, ending.end = agent.key, agent.stop
        assert key is not None
        yield key


def end_agent(key: str, node: str) -> None:
    """Tell an agent to end, and wait until it has."""
    ask_agent(key, node, {"say": "stop"})
    while ask_agent(key, node, {"say": "status"}) is not None:
        time.sleep(0.01)

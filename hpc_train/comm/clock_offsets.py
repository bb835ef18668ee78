"""How far the monotonic clocks of a job's nodes are apart, by messages to and fro between one rank of each.

All processes of a node have one monotonic clock. Rank 0 asks the lowest rank of every other node for its time, some
times over. The answer of the quickest exchange was given at its middle, to half its duration.

Source: Cristian, "Probabilistic clock synchronization", Distributed Computing 3 (1989).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hpc_train.comm.collectives import receive_from, send_to, world_group
from hpc_train.comm.world import World

# Assumed: the quickest of 20 exchanges met no other traffic; at 50 us each, 1000 nodes take a second.
_NUM_EXCHANGES = 20


@dataclass(frozen=True)
class ClockOffset:
    """offset_ns: a node's clock less that of rank 0's node. error_ns: how wrong it may be at the time of asking."""

    offset_ns: int
    error_ns: int


def measure_clock_offsets(world: World, clock: Callable[[], int] = time.perf_counter_ns) -> dict[int, ClockOffset]:
    """Offset by node rank, the same on every rank. Collective over all ranks."""
    # Rank 0's answer has all; the others say which rank is their node's first.
    first_of_node: dict[int, int] = {}
    for rank, node in enumerate(world.control.all_gather(world.node_rank)):
        first_of_node.setdefault(node, rank)
    found = {world.node_rank: ClockOffset(0, 0)} if world.rank == 0 else {}
    if len(first_of_node) > 1:
        line = _open_line(world)
        for node, rank in first_of_node.items():
            if rank == 0:
                continue
            if world.rank == 0:
                found[node] = _ask(line, rank, clock)
            elif world.rank == rank:
                for _ in range(_NUM_EXCHANGES):
                    line.receive(0)
                    line.send(0, clock())
    plain = {str(node): (offset.offset_ns, offset.error_ns) for node, offset in found.items()}
    return {int(node): ClockOffset(*offset) for node, offset in world.control.broadcast(plain).items()}


def _ask(line: _Line, rank: int, clock: Callable[[], int]) -> ClockOffset:
    exchanges = []
    for _ in range(_NUM_EXCHANGES):
        before = clock()
        line.send(rank, 0)
        answer = line.receive(rank)
        after = clock()
        exchanges.append((after - before, answer - (before + after) // 2))
    duration, offset = min(exchanges)
    return ClockOffset(offset, (duration + 1) // 2)


class _Line(ABC):
    """One number at a time between two ranks."""

    @abstractmethod
    def send(self, rank: int, value: int) -> None: ...

    @abstractmethod
    def receive(self, rank: int) -> int: ...


def _open_line(world: World) -> _Line:
    return _MpiLine(world) if world.mpi is not None else _TorchLine(world)


class _MpiLine(_Line):
    def __init__(self, world: World) -> None:
        assert world.mpi is not None
        self._mpi = world.mpi

    def send(self, rank: int, value: int) -> None:
        self._mpi.Send(np.array([value], dtype=np.int64), dest=rank)

    def receive(self, rank: int) -> int:
        value = np.empty(1, dtype=np.int64)
        self._mpi.Recv(value, source=rank)
        return int(value[0])


class _TorchLine(_Line):
    def __init__(self, world: World) -> None:
        self._device, self._group = world.device, world_group(world.world_size, world.rank, world.backend)

    def send(self, rank: int, value: int) -> None:
        send_to(torch.tensor([value], dtype=torch.int64, device=self._device), rank, self._group).wait()

    def receive(self, rank: int) -> int:
        value = torch.empty(1, dtype=torch.int64, device=self._device)
        receive_from(value, rank, self._group).wait()
        return int(value)

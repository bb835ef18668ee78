"""Small messages between all ranks, as JSON: facts at start, verdicts on errors, who does what.

Nothing here is meant for tensors. Nothing is pickled. With MPI the messages go over MPI, otherwise
over the torch process group.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hpc_train.errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    DataError,
    HangError,
    HpcTrainError,
    LaunchError,
)

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

# Short waits stay short, and long ones cost nothing that could be measured (assumed).
_PAUSE_STEP_S, _LONGEST_PAUSE_S = 20e-6, 5e-3

_DIFFERENT = 2**32

_KINDS: dict[str, type[HpcTrainError]] = {
    kind.__name__: kind
    for kind in (ConfigError, LaunchError, DataError, HangError, CheckpointError, CollectiveError, HpcTrainError)
}


@dataclass(frozen=True)
class Compared:
    """Whose value differs from rank 0's, the same on every rank. note: rank 0's."""

    note: str
    num_different: int = 0
    first_different: int | None = None


class Control(ABC):
    """A channel for JSON values between ranks 0 .. size - 1. Every method is collective over all of them."""

    rank: int
    size: int

    @abstractmethod
    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """The values of all ranks, by rank, on `root`; None elsewhere. For what is long, or of many ranks."""
        values = self.all_gather(value)
        return values if self.rank == root else None

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Root's value on every rank."""
        return self.all_gather(value if self.rank == root else None)[root]

    def compare(self, value: str, note: str, timeout_s: float | None = None) -> Compared:
        """Whether all ranks hold the same value, and rank 0's note, which need not be the same.

        timeout_s: for the others to come, where the channel has no limit of its own; None: as long as it takes.

        Raises:
            CollectiveError: they did not come.
        """
        answers = self.all_gather([value, note])
        different = [rank for rank, (other, _) in enumerate(answers) if other != answers[0][0]]
        return Compared(answers[0][1], len(different), different[0] if different else None)

    def barrier(self) -> None:
        """Return once every rank has arrived."""
        self.all_gather(None)

    def agree(self, error: BaseException | None, host: str = "") -> None:
        """Meet after a step that may fail on some ranks: return if it failed nowhere, else raise everywhere.

        The error raised is that of the lowest failing rank, of the same kind, and carries `reporter`, the rank
        that shall print it, so that it is printed once. An error that is not the user's to mend is raised on
        the rank where it happened as it is, and as a CollectiveError elsewhere.
        """
        mine = None if error is None else [_kind_of(error), str(error) or type(error).__name__, host]
        verdicts = self.all_gather(mine)
        failed = [rank for rank, verdict in enumerate(verdicts) if verdict is not None]
        if failed:
            _raise_agreed(self.rank, failed, verdicts, error)


class SingleControl(Control):
    """The channel of a process that is alone."""

    rank = 0
    size = 1

    def all_gather(self, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value))]


class MpiControl(Control):
    """JSON over an MPI communicator, as byte buffers."""

    def __init__(self, communicator: MPI.Comm) -> None:
        self._communicator = communicator
        self.rank = communicator.Get_rank()
        self.size = communicator.Get_size()

    def all_gather(self, value: Any) -> list[Any]:
        self.barrier()
        data = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        lengths = np.empty(self.size, dtype=np.int64)
        self._communicator.Allgather(np.array([data.size], dtype=np.int64), lengths)
        received = np.empty(int(lengths.sum()), dtype=np.uint8)
        self._communicator.Allgatherv(data, [received, lengths])
        return _split_json(received, lengths)

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        self.barrier()
        data = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        length = np.array([data.size], dtype=np.int64)
        if self.rank != root:
            self._communicator.Gather(length, None, root=root)
            self._communicator.Gatherv(data, None, root=root)
            return None
        lengths = np.empty(self.size, dtype=np.int64)
        self._communicator.Gather(length, lengths, root=root)
        received = np.empty(int(lengths.sum()), dtype=np.uint8)
        self._communicator.Gatherv(data, [received, lengths], root=root)
        return _split_json(received, lengths)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        self.barrier()
        data = np.frombuffer(json.dumps(value if self.rank == root else None).encode(), dtype=np.uint8)
        length = np.array([data.size], dtype=np.int64)
        self._communicator.Bcast(length, root=root)
        buffer = data.copy() if self.rank == root else np.empty(int(length[0]), dtype=np.uint8)
        self._communicator.Bcast(buffer, root=root)
        return json.loads(buffer.tobytes())

    def compare(self, value: str, note: str, timeout_s: float | None = None) -> Compared:
        """Two small messages down and up a tree, where gathering all values would bring n of them to each of n."""
        from mpi4py import MPI

        if timeout_s is not None:
            self._meet(timeout_s)
        first, note = self.broadcast([value, note])
        mine = np.array([value != first, -self.rank if value != first else -self.size], dtype=np.int64)
        total, highest = np.empty_like(mine), np.empty_like(mine)
        self._communicator.Allreduce(mine, total, op=MPI.SUM)
        self._communicator.Allreduce(mine, highest, op=MPI.MAX)
        return Compared(note, int(total[0]), -int(highest[1]) if total[0] else None)

    def barrier(self) -> None:
        """Wait asleep: MPI's own waiting takes a whole core from ranks that are still on their way."""
        self._meet(math.inf)

    def _meet(self, timeout_s: float) -> None:
        request = self._communicator.Ibarrier()
        pause_s, deadline = 0.0, time.monotonic() + timeout_s
        while not request.Test():
            if time.monotonic() > deadline:
                raise CollectiveError(
                    f"rank {self.rank} waited {timeout_s:g} s for the others of {self.size} ranks, and some did not "
                    "come. Every rank must make this call; look at what the others do, or whether they have ended."
                )
            time.sleep(pause_s)
            pause_s = min(pause_s + _PAUSE_STEP_S, _LONGEST_PAUSE_S)


_COMPARISONS = itertools.count()
"""Of this process, not of a channel: a second channel on the same store must not find what the first one left there."""


class TorchControl(Control):
    """JSON over the default torch process group, for ranks that were not started over MPI."""

    def __init__(self, rank: int, size: int, device: Any) -> None:
        self.rank = rank
        self.size = size
        self._device = device

    def all_gather(self, value: Any) -> list[Any]:
        import torch
        import torch.distributed as dist

        padded, sizes = self._padded(value)
        received = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(received, padded)
        return _parsed(received, sizes)

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        import torch
        import torch.distributed as dist

        padded, sizes = self._padded(value)
        received = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == root else None
        dist.gather(padded, received, dst=root)
        return None if received is None else _parsed(received, sizes)

    def barrier(self) -> None:
        """Without tensors of Python's: a thread of gloo's may let go of those after all ranks have met, and a process
        that ends in that moment is aborted (1 of some 120 ends on a busy machine).
        """
        import torch.distributed as dist

        dist.barrier()

    def compare(self, value: str, note: str, timeout_s: float | None = None) -> Compared:
        """Over the store, in four operations a rank: a ring of n - 1 messages takes ten times as long on gloo."""
        from torch.distributed import distributed_c10d

        store: Any = distributed_c10d._get_default_store()
        if not store.has_extended_api():
            return super().compare(value, note)
        prefix = f"hpc_train/compared/{next(_COMPARISONS)}"
        if self.rank == 0:
            store.set(f"{prefix}/first", json.dumps([value, note]))
        first, note = json.loads(store.get(f"{prefix}/first"))
        is_different = value != first
        if is_different:
            store.append(f"{prefix}/different", f"{self.rank} ")
        # One number counts both: ranks, and above them ranks that differ.
        count = store.add(f"{prefix}/count", 1 + (_DIFFERENT if is_different else 0))
        if count % _DIFFERENT == self.size:
            store.set(f"{prefix}/all", str(count // _DIFFERENT))
        num_different = int(store.get(f"{prefix}/all"))
        if not num_different:
            return Compared(note)
        return Compared(note, num_different, min(map(int, store.get(f"{prefix}/different").split())))

    def _padded(self, value: Any) -> tuple[torch.Tensor, list[int]]:
        """A value's bytes, filled up to those of the longest one, and how many each rank's are. Collective."""
        import torch
        import torch.distributed as dist

        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int64, device=self._device)
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length)
        sizes = [int(item) for item in lengths]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
        padded[: data.numel()] = data.to(self._device)
        return padded, sizes


def _parsed(received: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[Any]:
    return [json.loads(bytes(item[:size].cpu().numpy())) for item, size in zip(received, sizes, strict=True)]


def _split_json(received: np.ndarray, lengths: np.ndarray) -> list[Any]:
    ends = np.cumsum(lengths)
    return [json.loads(received[end - length : end].tobytes()) for end, length in zip(ends, lengths, strict=True)]


def _kind_of(error: BaseException) -> str:
    for kind in type(error).__mro__:
        if kind.__name__ in _KINDS:
            return kind.__name__
    return ""


def _raise_agreed(rank: int, failed: list[int], verdicts: list[Any], error: BaseException | None) -> NoReturn:
    first = failed[0]
    kind, message, host = verdicts[first]
    if rank == first and error is not None:
        error.reporter = first  # type: ignore[attr-defined]
        raise error
    others = f" (and on {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    where = f"rank {first} on {host}" if host else f"rank {first}"
    agreed = _KINDS.get(kind, CollectiveError)(f"{where}: {message}{others}")
    agreed.reporter = first
    raise agreed from error

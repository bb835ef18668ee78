"""A rank's copy of its training state, in shared memory that is taken once and filled at every save."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import final

import torch

from hpc_train.checkpoint.format.placed import PlacedBox
from hpc_train.checkpoint.format.state import StatePiece
from hpc_train.checkpoint.saving.torch_files import place_pieces
from hpc_train.cluster.memory_segment import Segment
from hpc_train.errors import HpcTrainError

_ALIGNMENT = 64
"""Of each box, in bytes, so that vector loads and stores are aligned."""


@final
class Snapshot:
    """placed: where the boxes lie in this rank's file. offsets: where the bytes of each begin in the memory."""

    def __init__(self, pieces: Sequence[StatePiece], rank: int) -> None:
        """Take the memory, all of it now, and pin it where the state lies on a GPU.

        Raises:
            HpcTrainError: the node has not so much memory.
        """
        self.placed = place_pieces(pieces, rank)
        self.offsets, self._num_bytes = _offsets(self.placed)
        self._boxes = [(piece.name, piece.box) for piece in pieces]
        self._devices = gpus_of(pieces)
        self._pinned: int | None = None
        self._targets: list[torch.Tensor] = []
        self._memory: mmap.mmap | None = None
        self.segment = Segment.create(f"checkpoint.rank_{rank}", self._num_bytes)
        try:
            self._lay_out(pieces)
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        return sum(box.num_bytes for box in self.placed)

    def fill(self, pieces: Sequence[StatePiece]) -> None:
        """Copy the state; it is whole when this returns. The pieces are those of the beginning, with other numbers."""
        assert [(piece.name, piece.box) for piece in pieces] == self._boxes, "the state has another layout"
        for target, piece in zip(self._targets, pieces, strict=True):
            target.copy_(piece.data, non_blocking=True)
        for device in self._devices:
            torch.cuda.synchronize(device)

    def close(self) -> None:
        """Give the memory back. Safe to call twice; what an agent has mapped stays there."""
        if self._pinned is not None:
            # Before it is unmapped: CUDA would take whatever comes to lie at these addresses for pinned.
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = None
        self._targets.clear()
        self._memory = None  # unmapped with the last tensor that lies in it
        self.segment.close()

    def _lay_out(self, pieces: Sequence[StatePiece]) -> None:
        # Every page is there before the first save: to find each in its turn would double the time of that.
        memory = self._memory = self.segment.map(writable=True, populate=True)
        self._targets += [
            torch.frombuffer(memory, dtype=piece.dtype, count=piece.data.numel(), offset=offset)
            if piece.data.numel()
            else torch.empty(0, dtype=piece.dtype)
            for piece, offset in zip(pieces, self.offsets, strict=True)
        ]
        if self._devices:
            self._pinned = _pin(torch.frombuffer(memory, dtype=torch.uint8))


def snapshot_bytes(pieces: Sequence[StatePiece], rank: int) -> int:
    """Memory that a snapshot of these pieces takes."""
    return _offsets(place_pieces(pieces, rank))[1]


def gpus_of(pieces: Sequence[StatePiece]) -> set[torch.device]:
    return {piece.data.device for piece in pieces if piece.data.is_cuda}


def _offsets(placed: Sequence[PlacedBox]) -> tuple[list[int], int]:
    """Where the bytes of each box begin, and of how many bytes the memory is."""
    offsets, end = [], 0
    for box in placed:
        offsets.append(end)
        end += -(-box.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(end, _ALIGNMENT)


def _pin(memory: torch.Tensor) -> int:
    """Let a GPU copy into it by itself; its address, by which that is ended."""
    address = memory.data_ptr()
    code = torch.cuda.cudart().cudaHostRegister(address, memory.numel(), 0)
    if int(code) != 0:
        raise HpcTrainError(
            f"{memory.numel() / 2**20:.1f} MiB of memory for checkpoints cannot be pinned for the GPU (CUDA error "
            f"{int(code)}). Is there a limit on locked memory (`ulimit -l`)?"
        )
    return address

"""A rank's copy of its training state, in shared memory that is taken once and filled at every save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from hpc_train.checkpoint.state import StatePiece
from hpc_train.checkpoint.torch_files import place_pieces
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
        self.offsets: list[int] = []
        end = 0
        for box in self.placed:
            self.offsets.append(end)
            end += -(-box.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._boxes = [(piece.name, piece.box) for piece in pieces]
        self._devices = {piece.data.device for piece in pieces if piece.data.is_cuda}
        self.segment = Segment.create(f"checkpoint.rank_{rank}", max(end, _ALIGNMENT))
        # Every page is there before the first save: to find each in its turn would double the time of that.
        self._memory = self.segment.map(writable=True, populate=True)
        self._targets = [
            torch.frombuffer(self._memory, dtype=piece.dtype, count=piece.data.numel(), offset=offset)
            if piece.data.numel()
            else torch.empty(0, dtype=piece.dtype)
            for piece, offset in zip(pieces, self.offsets, strict=True)
        ]
        if self._devices:
            _pin(torch.frombuffer(self._memory, dtype=torch.uint8))

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


def _pin(memory: torch.Tensor) -> None:
    """Let a GPU copy into it by itself; it stays so until the process ends."""
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        raise HpcTrainError(
            f"{memory.numel() / 2**20:.1f} MiB of memory for checkpoints cannot be pinned for the GPU (CUDA error "
            f"{int(code)}). Is there a limit on locked memory (`ulimit -l`)?"
        )

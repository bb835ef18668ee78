"""What a checkpoint is made of: boxes of named tensors that lie on this rank, and a few plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpc_train.plan.flat import Box


@dataclass(frozen=True)
class StatePiece:
    """A box of a global tensor on this rank.

    name, shape: global and free of any mesh. data: 1-dimensional, contiguous, the box's elements in row-major
    order; a view of live state, read by a save and filled by a load.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    data: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def tensor(self) -> torch.Tensor:
        """The box in its shape."""
        return self.data.view(self.box.sizes)


@dataclass(frozen=True)
class DeferredPiece:
    """A box that is made when it is written and not kept: what is larger than memory can be saved.

    make: gives the box in its shape, contiguous.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    def tensor(self) -> torch.Tensor:
        return self.make()


Piece = StatePiece | DeferredPiece

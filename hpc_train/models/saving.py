"""Where what layers save for their backward waits until then; by default where it was made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch


class LayerSaving(ABC):
    """Keeps what the layers of one micro-batch save."""

    @abstractmethod
    def layer(self, index: int, count: int, shared: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Entered for a layer's forward.

        index: among the `count` layers of this part of the model, which go forward in order and backward in reverse.
        shared: tensors that other layers use too.
        """

"""Bytes that tensors really take on the CPU: those saved for the backward, and all of them at their peak."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class SavedBytes:
    """A pair of hooks that follow what autograd saves: `now` and `peak`, each storage once.

    ignored: storages that are not activations, such as the flat buffer of parameters.
    """

    def __init__(self, *ignored: torch.Tensor) -> None:
        self.now = self.peak = 0
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self._uses: Counter[int] = Counter()

    def pack(self, tensor: torch.Tensor) -> Any:
        return _Saved(self, tensor)

    @staticmethod
    def unpack(saved: Any) -> torch.Tensor:
        return saved.tensor

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def _add(self, key: int, num_bytes: int) -> None:
        if key in self._ignored:
            return
        self._uses[key] += 1
        if self._uses[key] == 1:
            self.now += num_bytes
            self.peak = max(self.peak, self.now)

    def _remove(self, key: int, num_bytes: int) -> None:
        if key in self._ignored:
            return
        self._uses[key] -= 1
        if not self._uses[key]:
            self.now -= num_bytes


class _Saved:
    def __init__(self, owner: SavedBytes, tensor: torch.Tensor) -> None:
        self.tensor, self._owner = tensor, owner
        storage = tensor.untyped_storage()
        self._place = (storage.data_ptr(), storage.nbytes())
        owner._add(*self._place)

    def __del__(self) -> None:
        self._owner._remove(*self._place)


class LiveBytes(TorchDispatchMode):
    """While entered, follows every storage that an operation returns until it is freed: `now` and `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and to keep dynamo out torch would import it, for seconds a rank."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        num_bytes = storage.nbytes()
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes

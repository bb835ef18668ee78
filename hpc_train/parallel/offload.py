"""Activations that wait off the device between forward and backward: of each layer the share that the plan asks for.

- forward: what a layer saves is copied out storage by storage, each as far as its share goes, beside the work that
  follows; the rest of a storage stays. The last two layers stay whole, as their backwards come first
- backward: the first use of what a layer saved begins to bring back the layer before it, so that copies run beside
  its backward; a layer's own are awaited

On CUDA copies run on a stream for each direction, to and from kept pinned buffers; on the CPU, where everything is
host memory, they are plain copies to other buffers.

Source: ByteScale (arXiv 2502.21231), section 5.2.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch

from hpc_train.models.saving import LayerSaving
from hpc_train.plan.batch_cost import MILLI, RESIDENT_LAYERS

# assumed: below this a copy costs more calls than it saves bytes.
_SMALLEST_BYTES = 4096
_ALIGNMENT_BYTES = 512  # of the caching allocator's blocks


@final
class HostRoom:
    """Buffers of the host that are kept between uses, and copies to and from them.

    bytes_out: in use now. bytes_kept: all that were made.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_out = self.bytes_kept = 0
        self._free: dict[int, list[tuple[torch.Tensor, Any]]] = {}
        is_cuda = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if is_cuda else None
        self._back = torch.cuda.Stream(device) if is_cuda else None

    def copy_out(self, source_N: torch.Tensor) -> torch.Tensor:
        """A buffer whose head has these bytes, or will when all that is begun is over."""
        size = _size_class(len(source_N))
        kept = self._free.get(size)
        buffer_M, last_read = kept.pop() if kept else (self._make(size), None)
        self.bytes_out += size
        if self._out is None:
            buffer_M[: len(source_N)] = source_N
            return buffer_M
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        if last_read is not None:
            self._out.wait_event(last_read)
        with torch.cuda.stream(self._out):
            buffer_M[: len(source_N)].copy_(source_N, non_blocking=True)
        source_N.record_stream(self._out)
        return buffer_M

    def copy_back(self, buffer_M: torch.Tensor, target_N: torch.Tensor) -> Any:
        """Begin to bring bytes back; what is returned is for `wait` and `give_back`."""
        head_N = buffer_M[: len(target_N)]
        if self._back is None or self._out is None:
            target_N.copy_(head_N)
            return None
        self._back.wait_stream(torch.cuda.current_stream(self.device))
        self._back.wait_stream(self._out)
        with torch.cuda.stream(self._back):
            target_N.copy_(head_N, non_blocking=True)
        target_N.record_stream(self._back)
        return self._back.record_event()

    def wait(self, begun: Any) -> None:
        """What is launched from here on finds the bytes."""
        if begun is not None:
            torch.cuda.current_stream(self.device).wait_event(begun)

    def give_back(self, buffer_M: torch.Tensor, last_read: Any) -> None:
        """Nobody needs what is in a buffer once `last_read` is over."""
        self.bytes_out -= len(buffer_M)
        self._free.setdefault(len(buffer_M), []).append((buffer_M, last_read))

    def _make(self, num_bytes: int) -> torch.Tensor:
        self.bytes_kept += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")


@final
class OffloadedLayers(LayerSaving):
    """Keeps a share of what layers save in host memory, of one micro-batch.

    share_milli: thousandths of each storage. stays: tensors whose storages are left alone, such as parameters.
    """

    def __init__(self, room: HostRoom, share_milli: int, stays: Sequence[torch.Tensor]) -> None:
        self._room, self._share_milli = room, share_milli
        self._stays = {_address(tensor) for tensor in stays}
        self._kept = [*stays]  # so that no other storage gets their addresses
        self._away: dict[int, list[weakref.ref[_Away]]] = {}

    @contextmanager
    def layer(self, index: int, count: int, shared: Sequence[torch.Tensor]) -> Iterator[None]:
        self._kept += shared
        self._stays.update(_address(tensor) for tensor in shared)
        is_resident = index >= count - RESIDENT_LAYERS
        # By address, which is a storage's own as long as it is kept here.
        known: dict[int, tuple[torch.UntypedStorage, _Away]] = {}
        self._away[index] = []

        def pack(tensor: torch.Tensor) -> _Saved | _Stayed:
            storage = tensor.untyped_storage()
            if is_resident or _address(tensor) in self._stays or storage.nbytes() < _SMALLEST_BYTES:
                return _Stayed(self, index, tensor)
            if _address(tensor) not in known:
                away = _Away(self._room, tensor, self._share_milli)
                known[_address(tensor)] = (storage, away)
                self._away[index].append(weakref.ref(away))
            return _Saved(self, index, known[_address(tensor)][1], tensor)

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor()):
                yield
        finally:
            known.clear()  # autograd keeps `pack` as long as what it packed

    def bring_back(self, index: int) -> None:
        """Begin to bring back what a layer saved, once."""
        for reference in self._away.pop(index, ()):
            away = reference()
            if away is not None:
                away.begin_return()


@final
class _Away:
    """A storage whose head is in host memory."""

    def __init__(self, room: HostRoom, tensor: torch.Tensor, share_milli: int) -> None:
        bytes_N = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self._room, self._num_bytes = room, len(bytes_N)
        self._num_out = len(bytes_N) * share_milli // MILLI
        if share_milli < MILLI:
            self._num_out -= self._num_out % _ALIGNMENT_BYTES
        self._tail = bytes_N[self._num_out :].clone()
        self._here: torch.Tensor | None = None
        self._begun: Any = None
        self._buffer = room.copy_out(bytes_N[: self._num_out])

    def begin_return(self) -> None:
        if self._here is None:
            self._here = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._tail.device)
            self._here[self._num_out :] = self._tail
            self._begun = self._room.copy_back(self._buffer, self._here[: self._num_out])

    def storage(self) -> torch.UntypedStorage:
        """The whole again."""
        self.begin_return()
        assert self._here is not None
        self._room.wait(self._begun)
        return self._here.untyped_storage()

    def __del__(self) -> None:
        """When autograd has let go of all that was saved in it."""
        if hasattr(self, "_buffer"):  # it is not where making one failed
            self._room.give_back(self._buffer, self._begun)


@final
class _Saved:
    """A tensor in a storage that is away."""

    def __init__(self, owner: OffloadedLayers, index: int, away: _Away, tensor: torch.Tensor) -> None:
        self._owner, self._index, self._away = owner, index, away
        self._dtype, self._view = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> torch.Tensor:
        self._owner.bring_back(self._index)
        self._owner.bring_back(self._index - 1)
        storage = self._away.storage()
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._view)


@final
class _Stayed:
    """A tensor that stayed, whose use says that its layer's backward has begun."""

    def __init__(self, owner: OffloadedLayers, index: int, tensor: torch.Tensor) -> None:
        self._owner, self._index, self._tensor = owner, index, tensor

    def tensor(self) -> torch.Tensor:
        self._owner.bring_back(self._index - 1)
        return self._tensor


def _size_class(num_bytes: int) -> int:
    """At least so many bytes and at most a quarter more, so that micro-batches of other sizes use a buffer again."""
    unit = max(_ALIGNMENT_BYTES, 1 << max(0, num_bytes.bit_length() - 3))
    return -(-num_bytes // unit) * unit


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

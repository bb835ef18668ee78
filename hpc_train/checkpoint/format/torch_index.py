"""torch's own index of a checkpoint, `.metadata`: a pickle of its Metadata. Made without torch.

torch.distributed.checkpoint takes 2 s of a processor to import, at the first save of every run, while all other ranks
wait. A test holds what is written here against what torch writes of the same boxes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from hpc_train.checkpoint.format.opcodes import integer, integers, named, text
from hpc_train.checkpoint.format.placed import PlacedBox

_METADATA = "torch.distributed.checkpoint.metadata"
_VERSION = "1.0.0"
"""Of the form of what is written here, as torch.distributed.checkpoint.filesystem counts."""
_NONE, _FALSE = b"N", b"\x89"


def index_bytes(placed: Sequence[PlacedBox]) -> bytes:
    """The content of torch's index of all ranks' boxes."""
    writer = _Writer()
    of_tensor: dict[str, list[PlacedBox]] = {}
    numbers = []
    for box in placed:
        boxes = of_tensor.setdefault(box.name, [])
        numbers.append(len(boxes))
        boxes.append(box)
    begin = b"\x80\x02" + writer.new(_METADATA, "Metadata") + b"}("
    tensors = [writer.once(text(name)) + writer.tensor(boxes) for name, boxes in of_tensor.items()]
    places = [writer.place(box, number) for box, number in zip(placed, numbers, strict=True)]
    return b"".join([
        begin,
        text("state_dict_metadata"), b"}(", *tensors, b"u",
        text("planner_data"), _NONE,
        text("storage_data"), b"}(", *places, b"u",
        text("storage_meta"), _NONE,
        text("version"), text(_VERSION),
        b"ub.",
    ])  # fmt: skip


class _Writer:
    """Opcodes of objects, which must come into the pickle in the order in which they are asked for."""

    def __init__(self) -> None:
        self._kept: dict[bytes, int] = {}

    def once(self, opcodes: bytes) -> bytes:
        """A value in full the first time, and from the reader's memory afterwards."""
        place = self._kept.get(opcodes)
        if place is not None:
            return b"j" + struct.pack("<I", place)
        self._kept[opcodes] = len(self._kept)
        return opcodes + b"r" + struct.pack("<I", self._kept[opcodes])

    def new(self, module: str, name: str) -> bytes:
        """An object without attributes."""
        return self.once(named(module, name)) + b")\x81"

    def tensor(self, boxes: Sequence[PlacedBox]) -> bytes:
        """TensorStorageMetadata of a tensor of these boxes."""
        whole = boxes[0]
        made = self.new(_METADATA, "TensorStorageMetadata") + b"}("
        made += self.once(text("properties")) + self._properties(whole.dtype)
        made += self.once(text("size")) + self._size(whole.shape)
        made += self.once(text("chunks")) + b"]("
        return b"".join([made, *map(self._chunk, boxes), b"eub"])

    def place(self, box: PlacedBox, number: int) -> bytes:
        """MetadataIndex of a tensor's box, which is the number-th, and the _StorageInfo of where it lies."""
        made = self.new(_METADATA, "MetadataIndex") + b"}("
        made += self.once(text("fqn")) + self.once(text(box.name))
        made += self.once(text("offset")) + self._size(box.offsets)
        made += self.once(text("index")) + integer(number) + b"ub"
        made += self.new("torch.distributed.checkpoint.filesystem", "_StorageInfo") + b"}("
        made += self.once(text("relative_path")) + self.once(text(box.file))
        made += self.once(text("offset")) + integer(box.item_start)
        return made + self.once(text("length")) + integer(box.item_bytes) + b"ub"

    def _chunk(self, box: PlacedBox) -> bytes:
        made = self.new(_METADATA, "ChunkStorageMetadata") + b"}("
        made += self.once(text("offsets")) + self._size(box.offsets)
        return made + self.once(text("sizes")) + self._size(box.sizes) + b"ub"

    def _size(self, values: tuple[int, ...]) -> bytes:
        return self.once(named("torch", "Size")) + integers(values) + b"\x85R"

    def _properties(self, dtype: str) -> bytes:
        """TensorProperties: type, layout, no gradient, memory's format, not pinned."""
        made = self.new(_METADATA, "TensorProperties") + b"(" + self.once(named("torch", dtype))
        made += self.once(named("torch.serialization", "_get_layout")) + self.once(text("torch.strided")) + b"\x85R"
        made += _FALSE
        made += self.once(named(_METADATA, "_MEM_FORMAT_ENCODING")) + integer(0) + b"\x85R"
        return made + _FALSE + b"tb"

"""Where the boxes of a rank lie in its file: known before the file is written. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpc_train.checkpoint.format.archive import archive_of
from hpc_train.checkpoint.format.stored_boxes import StoredBox
from hpc_train.plan.flat import Box


@dataclass(frozen=True)
class PlacedBox:
    """A box of a tensor and where it lies in a file: torch's item around it, and in that its raw bytes.

    Plain values, since ranks tell them to rank 0 and to node agents as JSON.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    item_start: int
    item_bytes: int
    start: int
    num_bytes: int

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, tree: Mapping[str, Any]) -> PlacedBox:
        return cls(**{**tree, **{name: tuple(tree[name]) for name in ("shape", "offsets", "sizes")}})


@dataclass(frozen=True)
class WrittenBox:
    """A box that was written, and the CRC-32 of its raw bytes."""

    placed: PlacedBox
    crc32: int

    def to_plain(self) -> dict[str, Any]:
        return {"placed": self.placed.to_plain(), "crc32": self.crc32}

    @classmethod
    def from_plain(cls, tree: Mapping[str, Any]) -> WrittenBox:
        return cls(PlacedBox.from_plain(tree["placed"]), int(tree["crc32"]))

    @property
    def stored(self) -> StoredBox:
        placed = self.placed
        return StoredBox(Box(placed.offsets, placed.sizes), placed.file, placed.start, placed.num_bytes, self.crc32)


def file_of_rank(rank: int) -> str:
    """The name that torch's own writer gives a rank's file."""
    return f"__{rank}_0.distcp"


def place_boxes(file: str, boxes: Iterable[tuple[str, tuple[int, ...], str, Box]]) -> list[PlacedBox]:
    """Lay out a file of boxes, one behind the other. boxes: of each its tensor's name, shape and type, and the box."""
    placed, start = [], 0
    for name, shape, dtype, box in boxes:
        archive = archive_of(dtype, box.sizes)
        place = (file, start, archive.total_bytes, start + len(archive.head), archive.num_bytes)
        placed.append(PlacedBox(name, shape, dtype, box.offsets, box.sizes, *place))
        start += archive.total_bytes
    return placed

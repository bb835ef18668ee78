"""Where the boxes of a tensor lie in a checkpoint's files, in columns. Needs neither torch nor NumPy.

A checkpoint of 12,288 ranks has 700,000 boxes. As objects they take seconds to make, as columns of numbers tenths.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final, overload

from hpc_train.plan.flat import Box


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor in a file: its raw little-endian bytes at `start`, row-major, and their CRC-32."""

    box: Box
    file: str
    start: int
    num_bytes: int
    crc32: int


@final
class StoredBoxes(Sequence[StoredBox]):
    """The boxes of a tensor, each made as it is asked for.

    file_names: of the checkpoint, or of this tensor alone. file: by box, the place of its file's name among them.
    start, crc32: by box. offsets, sizes: num_dims numbers of each box, one box behind the other.
    """

    def __init__(
        self,
        num_dims: int,
        item_bytes: int,
        file_names: Sequence[str],
        *,
        file: Sequence[int],
        start: Sequence[int],
        crc32: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        """Raises ValueError where the columns do not belong together, TypeError where they are not numbers."""
        self.num_dims, self.item_bytes, self.file_names = num_dims, item_bytes, file_names
        self.file, self.start, self.crc32 = array("q", file), array("q", start), array("q", crc32)
        self.offsets, self.sizes = array("q", offsets), array("q", sizes)
        count = len(self.file)
        lengths = {"start": count, "crc32": count, "offsets": count * num_dims, "sizes": count * num_dims}
        for name, length in lengths.items():
            if len(getattr(self, name)) != length:
                raise ValueError(f"{len(getattr(self, name))} numbers of {name} do not fit {count} boxes")
        if count and not 0 <= min(self.file) <= max(self.file) < len(file_names):
            raise ValueError(f"a box lies in a file that is none of {len(file_names)}")

    @classmethod
    def of(cls, boxes: Sequence[StoredBox], num_dims: int, item_bytes: int) -> StoredBoxes:
        place = {name: index for index, name in enumerate(dict.fromkeys(stored.file for stored in boxes))}
        return cls(
            num_dims,
            item_bytes,
            tuple(place),
            file=[place[stored.file] for stored in boxes],
            start=[stored.start for stored in boxes],
            crc32=[stored.crc32 for stored in boxes],
            offsets=[offset for stored in boxes for offset in stored.box.offsets],
            sizes=[size for stored in boxes for size in stored.box.sizes],
        )

    @classmethod
    def from_plain(
        cls, tree: Mapping[str, Any], num_dims: int, item_bytes: int, file_names: Sequence[str]
    ) -> StoredBoxes:
        """What `to_plain` gave."""
        return cls(num_dims, item_bytes, file_names, **tree)

    def to_plain(self, place_of_file: Mapping[str, int]) -> dict[str, list[int]]:
        """The columns, with files by their place among all of a checkpoint."""
        names = self.file_names
        return {
            "file": [place_of_file[names[index]] for index in self.file],
            "start": self.start.tolist(),
            "crc32": self.crc32.tolist(),
            "offsets": self.offsets.tolist(),
            "sizes": self.sizes.tolist(),
        }

    def __len__(self) -> int:
        return len(self.file)

    @overload
    def __getitem__(self, index: int) -> StoredBox: ...
    @overload
    def __getitem__(self, index: slice) -> list[StoredBox]: ...
    def __getitem__(self, index: int | slice) -> StoredBox | list[StoredBox]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        first, last = row * self.num_dims, (row + 1) * self.num_dims
        box = Box(tuple(self.offsets[first:last]), tuple(self.sizes[first:last]))
        name = self.file_names[self.file[row]]
        return StoredBox(box, name, self.start[row], box.num_elements * self.item_bytes, self.crc32[row])

    def __iter__(self) -> Iterator[StoredBox]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredBoxes) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((len(self), bytes(self.crc32)))

    def _key(self) -> tuple[object, ...]:
        names = [self.file_names[index] for index in self.file]
        return self.num_dims, self.item_bytes, names, self.start, self.crc32, self.offsets, self.sizes

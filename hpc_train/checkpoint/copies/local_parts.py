"""Parts of the state on a node's own disk, for quick restarts: their names, their records, what is sound. No torch.

A node's folder of a run holds parts of several steps: the node's own, and those of the node whose copies it keeps. A
part is a folder with the files of one node's ranks, laid out as in a checkpoint, and a record that is written last. It
gets its name when all of it is on disk. All nodes' parts of one save, which has a word of its own, are a whole set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.files.finish import laid_out
from hpc_train.checkpoint.format.manifest import checked_text, with_checksum
from hpc_train.checkpoint.format.placed import WrittenBox
from hpc_train.checkpoint.stores.cause import StoreError
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.errors import CheckpointError

RECORD_FILE = "part.json"
_VERSION = 2
_NAME = re.compile(r"step_(\d{7,})\.([0-9a-f]+)\.(\d+)-of-(\d+)")
_FILE = re.compile(r"__\d+_0\.distcp")


@dataclass(frozen=True, order=True)
class PartName:
    """Which part: of which save (its step, and its word, which no other save has), and of which of its nodes."""

    step: int
    token: str
    node: int
    num_nodes: int

    @property
    def folder(self) -> str:
        return f"step_{self.step:07d}.{self.token}.{self.node}-of-{self.num_nodes}"

    @classmethod
    def of_folder(cls, name: str) -> PartName | None:
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), match[2], int(match[3]), int(match[4]))


@dataclass(frozen=True)
class PartRecord:
    """What a part holds. files: size in bytes by name.

    attempt: the start of the run that made it. values: the plain values of the save, with the part of rank 0's node;
    None with others. store_step: the newest checkpoint that the run had in its store then; None: it had none.
    """

    name: PartName
    attempt: str
    store_step: int | None
    values: dict[str, Any] | None
    written: tuple[WrittenBox, ...]
    files: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())

    def to_json(self) -> str:
        tree = {
            "format_version": _VERSION,
            "name": self.name.folder,
            "attempt": self.attempt,
            "store_step": self.store_step,
            "values": self.values,
            "written": [box.to_plain() for box in self.written],
            "files": self.files,
        }
        return with_checksum(json.dumps(tree))

    @classmethod
    def parse(cls, text: str, where: str) -> PartRecord:
        """The record of a text.

        Raises:
            CheckpointError: it is damaged, or of another version.
        """
        try:
            tree = json.loads(checked_text(text, where))
            if int(tree["format_version"]) != _VERSION:
                raise CheckpointError(f"{where} has format version {tree['format_version']}; {_VERSION} is read here")
            name = PartName.of_folder(tree["name"])
            if name is None:
                raise ValueError(f"{tree['name']!r} is no name of a part")
            written = tuple(WrittenBox.from_plain(box) for box in tree["written"])
            record = cls(name, str(tree["attempt"]), tree["store_step"], tree["values"], written, dict(tree["files"]))
            if record.files != laid_out(written) or not all(map(_FILE.fullmatch, record.files)):
                raise ValueError("its files are not those of its boxes")
            return record
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise CheckpointError(f"{where} cannot be read: {type(problem).__name__}: {problem}") from None


def record_of(
    name: PartName, attempt: str, store_step: int | None, values: dict[str, Any] | None, written: Sequence[WrittenBox]
) -> PartRecord:
    """The record of boxes that were written."""
    return PartRecord(name, attempt, store_step, values, tuple(written), laid_out(written))


def read_record(part: Location) -> PartRecord:
    """The record of a part. Raises FileNotFoundError, or CheckpointError where it is damaged."""
    try:
        return PartRecord.parse((part / RECORD_FILE).read_text(), str(part / RECORD_FILE))
    except UnicodeDecodeError as problem:
        raise CheckpointError(f"{part / RECORD_FILE} cannot be read: {problem}") from None


def sound_parts(folder: Path) -> tuple[list[PartRecord], list[str]]:
    """Parts whose record is good and whose files have their sizes, and what is wrong with others. No byte is read."""
    found, faults = [], []
    root = locate(folder)
    try:
        names = [name for entry in root.entries() if (name := PartName.of_folder(entry.name)) is not None]
    except FileNotFoundError:
        return [], []
    except StoreError as problem:
        return [], [str(problem)]
    for name in names:
        place = root / name.folder
        try:
            record = read_record(place)
            sizes = {entry.name: entry.num_bytes for entry in place.entries()}
            if record.name != name or any(sizes.get(file) != size for file, size in record.files.items()):
                raise CheckpointError(f"{place} is not what its record says")
            found.append(record)
        except FileNotFoundError as problem:
            faults.append(f"{place} is not whole: {problem}")
        except CheckpointError as problem:
            faults.append(str(problem))
    return found, faults

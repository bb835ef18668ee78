"""Parts of the state on a node's own disk, for quick restarts: their names, their records, what is sound. No torch.

A node's folder of a run holds parts of several steps: the node's own, and those of the node whose copies it keeps. A
part is a folder with the files of one node's ranks, laid out as in a checkpoint, and a record that is written last. It
gets its name when all of it is on disk. All nodes' parts of one save, which has a word of its own, are a whole set.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from hpc_train.checkpoint.finish import laid_out
from hpc_train.checkpoint.location import Location, locate
from hpc_train.checkpoint.manifest import checked_text, with_checksum
from hpc_train.checkpoint.placed import WrittenBox
from hpc_train.checkpoint.store import StoreError
from hpc_train.cluster.mounts import file_system_of, is_shared
from hpc_train.cluster.scratch import private_folder, user_folder_name
from hpc_train.errors import CheckpointError, ConfigError, LaunchError

_RECORD_FILE = "part.json"
_VERSION = 1
_NAME = re.compile(r"step_(\d{7,})\.([0-9a-f]+)\.(\d+)-of-(\d+)")


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

    values: the plain values of the save, with the part of rank 0's node; None with others. store_step: the newest
    checkpoint that the run had in its store then; None: it had none.
    """

    name: PartName
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
            record = cls(name, tree["store_step"], tree["values"], written, dict(tree["files"]))
            if any(box.placed.file not in record.files for box in written) or any("/" in file for file in record.files):
                raise ValueError("its files are not those of its boxes")
            return record
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise CheckpointError(f"{where} cannot be read: {type(problem).__name__}: {problem}") from None


def record_of(
    name: PartName, store_step: int | None, values: dict[str, Any] | None, written: Sequence[WrittenBox]
) -> PartRecord:
    """The record of boxes that were written."""
    return PartRecord(name, store_step, values, tuple(written), laid_out(written))


def folder_of_run(path: str, run_dir: Path, env: Mapping[str, str]) -> Path:
    """Where this node keeps parts of a run. path: checkpoint.local.path; $NAME in it stands for a variable.

    Raises:
        ConfigError: a variable that is not set here.
    """
    try:
        parent = Path(Template(path).substitute(env))
    except KeyError as problem:
        raise ConfigError(
            f"checkpoint.local.path={path}: {problem.args[0]} is not set on this node. Give a folder by its path, or a "
            "variable that is set on every node"
        ) from None
    except ValueError as problem:
        raise ConfigError(
            f"checkpoint.local.path={path} cannot be read: {problem}. Write $$ for a dollar sign"
        ) from None
    if not parent.is_absolute():
        raise ConfigError(f"checkpoint.local.path={path} is {parent} here, which is not a path from / on")
    whole = run_dir.resolve()
    digest = hashlib.sha256(str(whole).encode()).hexdigest()[:12]
    return parent / user_folder_name(os.geteuid()) / f"{whole.parent.name}-{whole.name}-{digest}"


def make_folder(folder: Path) -> Location:
    """Make a run's folder on this node, ours alone.

    Raises:
        CheckpointError: there is no such disk, it is not this node's own, or the folder is somebody else's.
    """
    parent = folder.parent.parent
    if not parent.is_dir():
        raise CheckpointError(f"checkpoint.local.path: {parent} is no folder on this node; choose another one")
    if is_shared(parent):
        raise CheckpointError(
            f"checkpoint.local.path: {parent} is on {file_system_of(parent)}, which all nodes share. Give a folder on "
            "each node's own disk, or in its memory (/dev/shm)"
        )
    try:
        private_folder(folder.parent)
        private_folder(folder)
    except LaunchError as problem:
        raise CheckpointError(f"checkpoint.local.path: {problem}") from problem
    return locate(folder)


def sound_parts(folder: Path) -> tuple[list[PartRecord], list[str]]:
    """Parts whose record is good and whose files have their sizes, and what is wrong with others. No byte is read."""
    found, faults = [], []
    root = locate(folder)
    if (stranger := _of_a_stranger(folder)) is not None:
        return [], [stranger]
    try:
        names = [name for entry in root.entries() if (name := PartName.of_folder(entry.name)) is not None]
    except FileNotFoundError:
        return [], []
    except StoreError as problem:
        return [], [str(problem)]
    for name in names:
        place = root / name.folder
        try:
            record = PartRecord.parse((place / _RECORD_FILE).read_text(), str(place / _RECORD_FILE))
            sizes = {entry.name: entry.num_bytes for entry in place.entries()}
            if record.name != name or any(sizes.get(file) != size for file, size in record.files.items()):
                raise CheckpointError(f"{place} is not what its record says")
            found.append(record)
        except FileNotFoundError as problem:
            faults.append(f"{place} is not whole: {problem}")
        except (CheckpointError, UnicodeDecodeError) as problem:
            faults.append(str(problem))
    return found, faults


def _of_a_stranger(folder: Path) -> str | None:
    """Why a folder is not trusted that somebody else may have made; None where it is ours, or not there."""
    for path in (folder.parent, folder):
        try:
            found = path.lstat()
        except FileNotFoundError:
            return None
        except OSError as problem:
            return f"{path} cannot be looked at: {problem.strerror}"
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            return f"{path} is not ours alone, so that what is in it may be somebody else's"
    return None


@contextmanager
def new_part(root: Location, name: PartName) -> Iterator[Location]:
    """A folder to write the files of a part into; it is gone if that fails. See `complete`."""
    temporary = root / f".{name.folder}.tmp-{uuid.uuid4().hex}"
    temporary.make_folder()
    try:
        yield temporary
    except BaseException:
        with suppress(StoreError):
            temporary.remove()
        raise


def complete(temporary: Location, record: PartRecord) -> None:
    """Make a folder whose files are durable a part."""
    (temporary / _RECORD_FILE).write_text(record.to_json())
    temporary.flush()
    final = temporary.parent / record.name.folder
    temporary.rename(final)
    final.parent.flush()


def remove_others(root: Location, tokens: Collection[str]) -> None:
    """Remove all parts but those of some saves, and all that was left half-written of others."""
    try:
        entries = root.entries()
    except FileNotFoundError:
        return
    for entry in entries:
        name = PartName.of_folder(entry.name.removeprefix(".").partition(".tmp-")[0])
        if name is not None and name.token not in tokens:
            (root / entry.name).remove()

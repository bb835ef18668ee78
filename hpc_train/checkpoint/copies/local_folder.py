"""A run's folder of parts on a node's own disk: where it is, and who may change it. Needs no torch.

Agents of a start that was killed may still be at work there when the next one begins. So the folder is claimed, by the
ranks before they look into it and by their agent; from then on agents of other starts change nothing in it. A claim
names the node too: two nodes that find each other's claim share the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from string import Template
from typing import final

from hpc_train.checkpoint.copies.local_parts import RECORD_FILE, PartName, PartRecord
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.cluster.mounts import file_system_of, is_shared
from hpc_train.cluster.scratch import private_folder, user_folder_name
from hpc_train.errors import CheckpointError, ConfigError, LaunchError

_CLAIM_FILE, _LOCK_FILE = "claim.json", "lock"
_LOCK_S, _LOCK_PAUSE_S = 10.0, 0.02
"""For a lock; assumed: it is held for a few renames, and longer only by who hangs on the disk."""


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


@final
class NodeFolder:
    """A run's folder on this node, for one start of the run, until another one claims it."""

    def __init__(self, folder: Path, attempt: str, node: int, *, is_claimed: bool = False) -> None:
        """Make the folder where it is not there, ours alone, and claim it.

        attempt: this start of the run (see `attempt`). node: this node's number in it. is_claimed: it is there, and
        this start has claimed it unless another one has since.

        Raises:
            CheckpointError: there is no such disk, all nodes share it, or the folder is somebody else's.
        """
        self.path, self._attempt, self._node = folder, attempt, node
        self.root: Location = locate(folder)
        if is_claimed:
            return
        self._make()
        try:
            with self._locked():
                found = self._claim()
                if found is not None and found[0] == attempt and found[1] != node:
                    raise CheckpointError(
                        f"checkpoint.local.path: {folder.parent.parent} is one and the same for nodes {found[1]} and "
                        f"{node} of this job. Give a folder on each node's own disk, or a path with a variable that "
                        "differs between nodes"
                    )
                self._write_claim()
        except OSError as problem:
            raise CheckpointError(f"checkpoint.local.path: {folder} cannot be used: {problem}") from problem

    @contextmanager
    def new_part(self, name: PartName) -> Iterator[Location]:
        """A folder to write the files of a part into; it is gone if that fails. See `complete`."""
        self._make()  # a site may have cleaned its disks
        temporary = self.root / f".{name.folder}.tmp-{uuid.uuid4().hex}"
        temporary.make_folder()
        try:
            yield temporary
        except BaseException:
            with suppress(CheckpointError):  # the next save removes it
                temporary.remove()
            raise

    def complete(self, temporary: Location, record: PartRecord, check: Callable[[], None]) -> None:
        """Make a folder whose files are durable a part. check: raises where it is of no use any more.

        Raises:
            CheckpointError: another start of the run has claimed the folder.
        """
        (temporary / RECORD_FILE).write_text(record.to_json())
        temporary.flush()
        with self._locked():
            self._require_claim()
            check()
            temporary.rename(self.root / record.name.folder)
        self.root.flush()

    def keep_only(self, tokens: Collection[str], check: Callable[[], None] = lambda: None) -> None:
        """Remove all parts but those of some saves, and all that was left half-written of others. Raises as above."""
        doomed = []
        with self._locked():
            self._require_claim()
            check()
            for entry in self.root.entries():
                name = PartName.of_folder(entry.name.removeprefix(".").partition(".tmp-")[0])
                if name is None or name.token in tokens:
                    continue
                place = self.root / entry.name
                if not entry.name.startswith("."):
                    # It loses its name first: what is half removed is no part.
                    place = self.root / f".{name.folder}.tmp-{uuid.uuid4().hex}"
                    (self.root / entry.name).rename(place)
                doomed.append(place)
        for place in doomed:
            place.remove()

    def _make(self) -> None:
        parent = self.path.parent.parent
        if not parent.is_dir():
            raise CheckpointError(f"checkpoint.local.path: {parent} is no folder on this node; choose another one")
        if is_shared(parent):
            raise CheckpointError(
                f"checkpoint.local.path: {parent} is on {file_system_of(parent)}, which all nodes share. Give a folder "
                "on each node's own disk, or in its memory (/dev/shm)"
            )
        try:
            private_folder(self.path.parent)
            private_folder(self.path)
        except LaunchError as problem:
            raise CheckpointError(f"checkpoint.local.path: {problem}") from problem

    @contextmanager
    def _locked(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path / _LOCK_FILE, flags, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise CheckpointError(
                            f"{self.path / _LOCK_FILE} is held by another process for {_LOCK_S:g} s: an agent of an "
                            "earlier start of this run may hang on that disk"
                        ) from None
                    time.sleep(_LOCK_PAUSE_S)
            yield
        finally:
            os.close(descriptor)

    def _claim(self) -> tuple[str, int] | None:
        """The start and the node that have the folder; None where nobody says so."""
        try:
            tree = json.loads((self.path / _CLAIM_FILE).read_text())
            return str(tree["attempt"]), int(tree["node"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _write_claim(self) -> None:
        temporary = self.path / f"{_CLAIM_FILE}.new"
        temporary.write_text(json.dumps({"attempt": self._attempt, "node": self._node}))
        os.replace(temporary, self.path / _CLAIM_FILE)

    def _require_claim(self) -> None:
        found = self._claim()
        if found is None:
            self._write_claim()
        elif found != (self._attempt, self._node):
            raise CheckpointError(f"another start of the run has {self.path} now, and its copies are left to it")

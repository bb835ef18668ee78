"""A node's own parts and its copies of another node's, as its agent makes them. Needs no torch.

1. parts of saves that are whole on no more nodes than needed are removed
2. this node's part is written to its own disk
3. it is sent to the node that keeps its copy, whose agent writes it there

Each save's copy has a thread of its own, and nothing waits for it: what fails or hangs there is told and fails nothing
else, and a save to the store goes first.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, final

from hpc_train.checkpoint.copies.copy_sender import Keeper, send_part
from hpc_train.checkpoint.copies.copy_server import CopyServer
from hpc_train.checkpoint.copies.copy_wire import SILENCE_S
from hpc_train.checkpoint.copies.local_folder import NodeFolder
from hpc_train.checkpoint.copies.local_parts import PartName, record_of
from hpc_train.checkpoint.files.parts import Part, write_parts
from hpc_train.checkpoint.files.write import Flow, in_words
from hpc_train.cluster.limits import available_memory_bytes
from hpc_train.cluster.mounts import file_system_of
from hpc_train.cluster.size_words import size_words, two_sizes
from hpc_train.errors import CheckpointError, HpcTrainError

Log = Callable[[str], None]

_BEFORE_S = 10.0
"""For the copy before to end; assumed: one that was given up ends in half a second, or hangs."""
_LOOK_S = 0.2
_NO_USE = "the store has what this copy has"


@final
class Copying:
    """The copy of one save, on its way or over."""

    def __init__(self, step: int, node: int, send_bytes_per_s: float | None) -> None:
        self.step, self._node = step, node
        self.to_disk, self.to_keeper = Flow(), Flow(send_bytes_per_s)
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._whole_here: str | None = None
        self._kept_twice: str | None = None
        self._problem: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether the ranks' memory is read for it no more, or to no effect."""
        return self._over.is_set()

    @property
    def is_hanging(self) -> bool:
        """Whether nothing has moved for so long that nobody waits for it any more."""
        moved_at = max(self._begin, self.to_disk.moved_at, self.to_keeper.moved_at)
        return not self.is_over and time.monotonic() - moved_at > SILENCE_S

    def told(self) -> dict[str, Any]:
        """The save's word if this node's own part is whole, and if another node has it too; and what went wrong."""
        with self._lock:
            return {"whole_here": self._whole_here, "kept_twice": self._kept_twice, "problem": self._problem}

    def is_here(self, token: str) -> None:
        """This node's own part is whole."""
        with self._lock:
            if not self.is_over:
                self._whole_here = token

    def is_kept(self, token: str) -> None:
        """Another node has this node's part as well."""
        with self._lock:
            if not self.is_over:
                self._kept_twice = token

    def end(self, problem: str | None) -> None:
        """It is made, or cannot be, or is not to be; nothing happens where it was over."""
        with self._lock:
            if not self.is_over:
                self._problem = None if problem is None else f"node {self._node}: {problem}"
                self._over.set()

    def give_up(self, why: str, problem: str | None = None) -> None:
        """From here on the ranks' memory may change: nothing that is read there later becomes a part.

        problem: what is wrong; None: nothing is, it is not wanted any more.
        """
        self.to_disk.stop(why)
        self.to_keeper.stop(why)
        self.end(problem)

    def give_up_if_hanging(self) -> None:
        if self.is_hanging:
            why = f"nothing of the copy of step {self.step} has moved for {SILENCE_S:g} s, and it is given up"
            self.give_up(why, why)

    def wait(self, limit_s: float) -> None:
        """Until it is over, hangs, or the time is over, when it is given up."""
        deadline = time.monotonic() + limit_s
        while not self._over.wait(_LOOK_S):
            self.give_up_if_hanging()
            if time.monotonic() > deadline:
                self.give_up("the node agent ends")


@final
class NodeCopies:
    """What one node keeps of one start of a run.

    port: where the node is listened for whose copies are kept here; None: there is no other node. has_room: for one
    save more than is asked for.
    """

    def __init__(self, message: Mapping[str, Any], log: Log) -> None:
        """message: folder, attempt, node, num_nodes, own_bytes, kept_node, kept_bytes (0 with one node), address,
        secret, keep, most_bytes, bytes_per_s, finish_s.

        Raises:
            CheckpointError: the folder cannot be used, or has not the room.
        """
        self._node, self._num_nodes = int(message["node"]), int(message["num_nodes"])
        self._attempt, self._secret = str(message["attempt"]), str(message["secret"])
        self._bytes_per_s, self._finish_s, self._log = message["bytes_per_s"], float(message["finish_s"]), log
        self._folder = NodeFolder(Path(message["folder"]), self._attempt, self._node)
        self.has_room = _require_room(self._folder.path, message)
        self._server: CopyServer | None = None
        if self._num_nodes > 1:
            kept, most = int(message["kept_node"]), int(message["kept_bytes"])
            address = str(message["address"])
            try:
                self._server = CopyServer(address, self._secret, self._folder, kept, self._num_nodes, most, log)
            except OSError as problem:
                raise CheckpointError(
                    f"the node agent cannot listen at {address} for copies: {problem}. Name the interface with "
                    "launch.interface"
                ) from problem
        self._keeper: Keeper | None = None
        self._last: Copying | None = None
        self._turn, self._turn_of = threading.Lock(), 0
        self._dropping: threading.Thread | None = None
        self._is_dropped = False

    @property
    def port(self) -> int | None:
        return None if self._server is None else self._server.port

    def set_keeper(self, address: str, port: int) -> None:
        self._keeper = Keeper(address, port, self._secret)

    def told(self) -> dict[str, Any]:
        """What has become of the last save that was to be copied."""
        nothing = {"whole_here": None, "kept_twice": None, "problem": None}
        return nothing if self._last is None else self._last.told()

    def start(
        self, step: int, token: str, parts: Sequence[Part], values: dict[str, Any] | None, order: Mapping[str, Any]
    ) -> Copying:
        """Begin to copy a save; raises nothing, and waits for nothing.

        parts: of this node's ranks. values: of rank 0's node. order: `keep`, the words of the saves before it that
        stay, and `store_step`.
        """
        name = PartName(step, token, self._node, self._num_nodes)
        copying = Copying(step, self._node, self._bytes_per_s)
        keep, work = {*map(str, order["keep"]), token}, (name, parts, values, order["store_step"])

        def run() -> None:
            try:
                with self._my_turn(step):
                    self._make(copying, keep, *work)
            except Exception as problem:
                why = str(problem) if isinstance(problem, HpcTrainError) else in_words(problem, self._folder.root)
                self._log(f"copies: step {step}: {why}")
                copying.end(why)
            finally:
                copying.end(None)

        if self._is_dropped:
            copying.end(None)
            return copying
        # A daemon: a disk that hangs must not keep the agent from ending.
        thread = threading.Thread(target=run, name=f"copy of step {step}", daemon=True)
        self._last = copying
        try:
            thread.start()
        except RuntimeError as problem:
            copying.end(f"no thread is to be had for the copy of step {step}: {problem}")
        return copying

    def drop(self) -> None:
        """Remove all parts, beside whatever else goes on, and make and keep none any more."""
        self._is_dropped = True
        if self._last is not None:
            self._last.give_up(_NO_USE)
        if self._server is not None:
            self._server.refuse(_NO_USE)
        self._dropping = threading.Thread(target=self._drop, name="drop copies", daemon=True)
        self._dropping.start()

    def close(self) -> None:
        """Take what is on its way here, and end."""
        limit_s = min(self._finish_s, SILENCE_S)
        if self._server is not None:
            self._server.close(limit_s)
        if self._dropping is not None:
            self._dropping.join(limit_s)

    @contextmanager
    def _my_turn(self, step: int) -> Iterator[None]:
        """One copy at a time: those that hang do not become many."""
        if not self._turn.acquire(timeout=_BEFORE_S):
            raise CheckpointError(f"the copy of step {self._turn_of} hangs still, so that step {step} is not copied")
        self._turn_of = step
        try:
            yield
        finally:
            self._turn.release()

    def _make(
        self,
        copying: Copying,
        keep: set[str],
        name: PartName,
        parts: Sequence[Part],
        values: dict[str, Any] | None,
        store_step: int | None,
    ) -> None:
        begin = time.monotonic()
        self._folder.keep_only(keep, copying.to_disk.check)
        with self._folder.new_part(name) as temporary:
            written = write_parts(temporary, parts, copying.to_disk, self._log)
            record = record_of(name, self._attempt, store_step, values, written)
            self._folder.complete(temporary, record, copying.to_disk.check)
        copying.is_here(name.token)
        own_s = time.monotonic() - begin
        if self._keeper is not None:
            send_part(self._keeper, record, parts, copying.to_keeper)
            copying.is_kept(name.token)
        sent = "" if self._keeper is None else f", and at {self._keeper} after {time.monotonic() - begin:.2f} s"
        size = f"{record.num_bytes / 2**20:.1f} MiB"
        self._log(f"copies: step {name.step}, {size}, is here after {own_s:.2f} s{sent}")

    def _drop(self) -> None:
        try:
            self._folder.keep_only(())
        except (CheckpointError, OSError) as problem:
            self._log(f"copies: what is in {self._folder.path} is left: {problem}")


def _require_room(folder: Path, message: Mapping[str, Any]) -> bool:
    """Refuse what would not fit: the saves that are kept, and one that is being written. Whether one more would."""
    own_bytes, kept_bytes, keep = (int(message[name]) for name in ("own_bytes", "kept_bytes", "keep"))
    need, most = (own_bytes + kept_bytes) * (keep + 1), message["most_bytes"]

    def refuse(there: int, words: str, cure: str) -> NoReturn:
        needed, room = two_sizes(need, there)
        raise CheckpointError(
            f"local copies need {needed} on this node: {size_words(own_bytes)} of its own and "
            f"{size_words(kept_bytes)} of another node, {keep + 1} times (checkpoint.local.keep={keep}, and one being "
            f"written). {room} {words}. {cure}"
        )

    if most is not None and need > most:
        refuse(most, f"are allowed by checkpoint.local.most_bytes={most}", "Raise that, or lower checkpoint.local.keep")
    try:
        there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        free = shutil.disk_usage(folder).free + there
    except OSError as problem:
        raise CheckpointError(f"checkpoint.local.path: {folder} cannot be used: {problem}") from problem
    memory = available_memory_bytes() if file_system_of(folder) in ("tmpfs", "ramfs") else None
    if memory is not None and need > memory + there:
        words = f"are to be had within the limits of the job, and {folder} is memory"
        refuse(memory + there, words, "Give the job more memory (--mem), or choose a folder on a disk")
    if need > free:
        words = f"are free at {folder}, with what this run has there"
        refuse(free, words, "Make room there, lower checkpoint.local.keep, or choose another folder")
    limits = [most, free, None if memory is None else memory + there]
    return need + own_bytes + kept_bytes <= min(limit for limit in limits if limit is not None)

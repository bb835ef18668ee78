"""A node's own parts and its copies of another node's, as its agent makes them. Needs no torch.

1. parts of saves that are whole on no more nodes than needed are removed
2. this node's part is written to its own disk
3. it is sent to the node that keeps its copy, whose agent writes it there

Both come behind the store's own writing, and what fails here is told and fails nothing else.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from hpc_train.checkpoint.copy_wire import CopyServer, Keeper, send_part
from hpc_train.checkpoint.local_parts import (
    PartName,
    complete,
    make_folder,
    new_part,
    record_of,
    remove_others,
)
from hpc_train.checkpoint.location import Location
from hpc_train.checkpoint.node_save import Part, write_parts
from hpc_train.checkpoint.store import StoreError
from hpc_train.checkpoint.write import Flow, in_words
from hpc_train.errors import CheckpointError, HpcTrainError

Log = Callable[[str], None]


@final
class NodeCopies:
    """What one node keeps of one start of a run.

    port: where the node is listened for whose copies are kept here; None: there is no other node.
    """

    def __init__(self, message: Mapping[str, Any], log: Log) -> None:
        """message: folder, node, num_nodes, own_bytes, kept_node, kept_bytes (0 with one node), address, secret, keep,
        whole (saves to keep from before), most_bytes, bytes_per_s, finish_s.

        Raises:
            CheckpointError: the folder cannot be used, or has not the room.
        """
        self._node, self._num_nodes = int(message["node"]), int(message["num_nodes"])
        self._secret, self._keep = str(message["secret"]), int(message["keep"])
        self._whole: list[str] = list(message["whole"])
        self._bytes_per_s, self._finish_s, self._log = message["bytes_per_s"], float(message["finish_s"]), log
        self._root = make_folder(Path(message["folder"]))
        _require_room(self._root, int(message["own_bytes"]), int(message["kept_bytes"]), self._keep, message)
        self._server: CopyServer | None = None
        if self._num_nodes > 1:
            kept, most = int(message["kept_node"]), int(message["kept_bytes"])
            address = str(message["address"])
            try:
                self._server = CopyServer(address, self._secret, self._root, kept, self._num_nodes, most, log)
            except OSError as problem:
                raise CheckpointError(
                    f"the node agent cannot listen at {address} for copies: {problem}. Name the interface with "
                    "launch.interface"
                ) from problem
        self._keeper: Keeper | None = None
        self._dropping: threading.Thread | None = None
        self._lock = threading.Lock()
        self._told: dict[str, Any] = {"whole_here": None, "problem": None}

    @property
    def port(self) -> int | None:
        return None if self._server is None else self._server.port

    def set_keeper(self, address: str, port: int) -> None:
        self._keeper = Keeper(address, port, self._secret)

    def told(self) -> dict[str, Any]:
        """Of the last save that was to be copied: its word, if this node's own part is whole, and what went wrong."""
        with self._lock:
            return dict(self._told)

    def make(
        self, step: int, token: str, parts: Sequence[Part], values: dict[str, Any] | None, order: Mapping[str, Any]
    ) -> None:
        """Copy a save; raises nothing.

        parts: of this node's ranks. values: of rank 0's node. order: `whole`, the word of the save before if that is
        whole on all nodes, and `store_step`.
        """
        begin = time.monotonic()
        self._tell(None, None)
        if order["whole"] is not None and order["whole"] not in self._whole:
            self._whole = [*self._whole, str(order["whole"])][-self._keep :]
        name = PartName(step, token, self._node, self._num_nodes)
        try:
            remove_others(self._root, {*self._whole, token})
            flow = Flow()
            with new_part(self._root, name) as temporary:
                written = write_parts(temporary, parts, flow, self._log)
                record = record_of(name, order["store_step"], values, written)
                complete(temporary, record)
            self._tell(token, None)
            own_s = time.monotonic() - begin
            if self._keeper is not None:
                send_part(self._keeper, record, parts, Flow(self._bytes_per_s))
        except Exception as problem:
            why = str(problem) if isinstance(problem, HpcTrainError) else in_words(problem, self._root)
            self._log(f"copies: step {step}: {why}")
            self._tell(self.told()["whole_here"], f"node {self._node}: {why}")
            return
        sent = "" if self._keeper is None else f", and at {self._keeper.address} after {time.monotonic() - begin:.2f} s"
        self._log(f"copies: step {step}, {record.num_bytes / 2**20:.1f} MiB, is here after {own_s:.2f} s{sent}")

    def drop(self) -> None:
        """Remove all parts, beside whatever else goes on."""
        self._whole = []
        self._dropping = threading.Thread(target=self._drop, name="drop copies", daemon=True)
        self._dropping.start()

    def close(self) -> None:
        """Take what is on its way here, and end."""
        if self._server is not None:
            self._server.close(self._finish_s)
        if self._dropping is not None:
            self._dropping.join(self._finish_s)

    def _drop(self) -> None:
        with suppress(StoreError):
            remove_others(self._root, ())

    def _tell(self, whole_here: str | None, problem: str | None) -> None:
        with self._lock:
            self._told = {"whole_here": whole_here, "problem": problem}


def _require_room(root: Location, own_bytes: int, kept_bytes: int, keep: int, message: Mapping[str, Any]) -> None:
    """Refuse what would not fit: the saves that are kept, and one that is being written."""
    need, most = (own_bytes + kept_bytes) * (keep + 1), message["most_bytes"]
    what = (
        f"local copies need {need / 2**30:.2f} GiB on this node: {own_bytes / 2**30:.2f} GiB of its own and "
        f"{kept_bytes / 2**30:.2f} GiB of another node, {keep + 1} times (checkpoint.local.keep={keep}, and one "
        "being written)"
    )
    if most is not None and need > most:
        raise CheckpointError(f"{what}, and checkpoint.local.most_bytes={most} allows {most / 2**30:.2f} GiB")
    folder = root.local
    assert folder is not None
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + there
    if need > free:
        raise CheckpointError(f"{what}, and {free / 2**30:.2f} GiB are free at {folder}. Choose another folder")

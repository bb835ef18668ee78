"""What the node agent does for copies on nodes' own disks: says yes to ranks, and lends saves its hands. No torch.

1. keep: a rank says where this node's parts go and whose copies it keeps; the answer is where that one is listened for
2. owner: a rank says where the agent listens that keeps this node's copies
3. a save that was copied into memory is handed over by the thread that writes checkpoints (see `copy_keeper`)
4. drop: the copies are of no use any more
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from hpc_train.cluster.agent_service import Peer, Service, error_answer

if TYPE_CHECKING:
    from hpc_train.checkpoint.copies.copy_keeper import NodeCopies

Log = Callable[[str], None]


@final
class CopyService(Service):
    """`copies.keep`, `copies.owner`, `copies.drop`; by the session of `checkpoint.open`, whose saves are copied."""

    name = "copies"

    def __init__(self, log: Log) -> None:
        self._log = log
        self._begun: set[str] = set()
        self._of_session: dict[str, NodeCopies] = {}

    def of(self, session: str) -> NodeCopies | None:
        """The copies of a session; None where it has none."""
        return self._of_session.get(session)

    def answer(self, peer: Peer, message: Mapping[str, Any], descriptors: Sequence[int]) -> Mapping[str, Any] | None:
        verb, session = str(message["say"]).partition(".")[2], str(message["session"])
        if verb == "keep":
            if session in self._begun:
                raise ValueError("copies.keep comes once")
            self._begun.add(session)
            # In a thread: a disk that hangs must not hold up what else the agent does.
            threading.Thread(target=self._keep, args=(peer, session, message), name="keep", daemon=True).start()
            return None
        found = self._of_session[session]
        if verb == "owner":
            found.set_keeper(str(message["address"]), int(message["port"]))
        elif verb == "drop":
            found.drop()
        else:
            raise ValueError(f"unknown message copies.{verb}")
        return {"ok": True}

    def gone(self, peer: Peer) -> None:
        pass

    def close(self) -> None:
        """Take what is on its way from the node whose copies are kept here."""
        for copies in self._of_session.values():
            copies.close()

    def _keep(self, peer: Peer, session: str, message: Mapping[str, Any]) -> None:
        from hpc_train.checkpoint.copies.copy_keeper import NodeCopies

        try:
            copies = self._of_session[session] = NodeCopies(message, self._log)
        except Exception as problem:
            peer.send(error_answer(problem))
        else:
            peer.send({"port": copies.port, "has_room": copies.has_room})

"""Writes checkpoints for the ranks of a node: what the node agent does for saves. Needs no torch.

1. open: each rank passes on the memory that it will copy its state into, once, and says where all of it goes; answered
   when the store has shown a file that rank 0 has put there
2. begin: a rank asks whether the save before is done; from here on the agent knows of the save, whoever ends
3. take: the rank's copy is whole; when all of the node's ranks have said so, a thread writes (see `node_save`)
4. outcome: whether the node's part is durable, or the whole checkpoint committed; asked again and again, so that one
   who waits notices an agent that does not answer any more

A rank that ends before its copy is whole fails the save on this node. One that ends later does not: what is to be
written lies in the agent's own mapping of the memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from hpc_train.checkpoint.saving.node_session import Log, Session
from hpc_train.cluster.agent_service import Peer, Service
from hpc_train.cluster.memory_segment import Segment
from hpc_train.errors import CheckpointError

if TYPE_CHECKING:
    import mmap

    from hpc_train.checkpoint.copies.copy_service import CopyService


@final
class CheckpointService(Service):
    """`checkpoint.open`, `begin`, `cancel`, `take`, `outcome`, `abandon`: see `Session`."""

    name = "checkpoint"
    takes_descriptors = True

    def __init__(self, log: Log, copies: CopyService | None = None) -> None:
        """copies: what makes node-local copies of the saves that are to have some."""
        self._log, self._copies = log, copies
        self._sessions: dict[str, Session] = {}
        self._session_of: dict[Peer, Session] = {}

    def answer(self, peer: Peer, message: Mapping[str, Any], descriptors: Sequence[int]) -> Mapping[str, Any] | None:
        verb = str(message["say"]).partition(".")[2]
        if verb == "open":
            self._open(peer, message, descriptors)
            return None
        for descriptor in descriptors:
            os.close(descriptor)
        token = str(message["token"])
        if verb == "outcome":
            # Also of those that are no rank's first connection.
            return self._sessions[str(message["session"])].outcome(token, message)
        session = self._session_of.get(peer)
        if session is None:
            raise ValueError("checkpoint.open comes first")
        if verb == "begin":
            return session.begin(token, message)
        if verb == "cancel":
            session.cancel(token)
        elif verb == "take":
            session.take(peer, token, message)
        elif verb == "abandon":
            session.abandon(token, str(message["reason"]))
        else:
            raise ValueError(f"unknown message checkpoint.{verb}")
        return {"ok": True}

    def gone(self, peer: Peer) -> None:
        session_of_peer = self._session_of.pop(peer, None)
        if session_of_peer is not None:
            session_of_peer.leave(peer)

    def close(self) -> None:
        """Write to the end what is whole here, for as long as the ranks have said that it may take."""
        for session in self._sessions.values():
            session.close()

    def _open(self, peer: Peer, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        memories = _map_all(descriptors)
        name = str(message["session"])
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = Session(name, message, self._log, self._copies)
        session.join(peer, message, memories)
        self._session_of[peer] = session


def _map_all(descriptors: Sequence[int]) -> list[mmap.mmap]:
    """The memory behind descriptors that came; all of them are closed.

    Raises:
        CheckpointError: it cannot be mapped.
    """
    memories = []
    left = list(descriptors)
    try:
        while left:
            segment = Segment.received(left.pop(0))
            try:
                memories.append(segment.map())
            finally:
                segment.close()
    except OSError as problem:
        raise CheckpointError(f"the ranks' memory cannot be mapped: {problem}") from problem
    finally:
        for descriptor in left:
            os.close(descriptor)
    return memories

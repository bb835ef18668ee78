"""A rank's part in copies on the nodes' own disks: which saves have some, and what of them is whole everywhere.

The node agents make the copies, from the memory into which ranks copy their state for any save.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from hpc_train.checkpoint.copies.local_folder import NodeFolder
from hpc_train.checkpoint.stores.bounded import bounded
from hpc_train.checkpoint.stores.caller import Bound
from hpc_train.cluster.agent_address import AgentConnection, ask_agent
from hpc_train.cluster.agent_wait import AgentWait
from hpc_train.comm.world import World
from hpc_train.config import LocalCopiesConfig
from hpc_train.errors import CheckpointError, HpcTrainError
from hpc_train.log import say, warn

_ANSWER_S = 60.0
"""For answers that wait for nothing; assumed: a node that swaps."""
_DROP_S = 10.0
"""For an agent's word that it removes the copies; assumed: one that has ended is not waited for at all."""


@dataclass(frozen=True)
class LocalFolder:
    """This node's folder of copies (see `local_folder.folder_of_run`), and this start of the run (see `attempt`)."""

    path: Path
    attempt: str


@final
class LocalCopies:
    """Methods are collective over all ranks unless they say otherwise.

    store_step: on rank 0, the newest checkpoint that the run has in its store, to be kept up to date by who knows.
    """

    def __init__(
        self,
        world: World,
        config: LocalCopiesConfig,
        folder: LocalFolder,
        holders: Sequence[int],
        address: Callable[[], str],
        finish_s: float,
    ) -> None:
        """folder: on this node. holders: by node the one that keeps its copy.

        address: finds the one under which other nodes reach this one.
        """
        self._world, self._config, self.folder = world, config, folder
        self._holders, self._address, self._finish_s = tuple(holders), address, finish_s
        self.store_step: int | None = None
        self._whole: tuple[str, ...] = ()
        self._twice: str | None = None
        self._has_room = False
        self._warned_of: str | None = None
        self._session: str | None = None

    def is_due(self, step: int) -> bool:
        """Not collective."""
        return step % self._config.every == 0

    def loaded(self, tokens: Sequence[str], twice: str | None, store_step: int | None) -> None:
        """Keep the parts of the save that was gone on from and of older ones; without any, none is of use.

        Not collective. tokens: the words of whole saves, oldest first. twice: of the newest of which each part is on
        two nodes. store_step: on rank 0, the newest checkpoint in the store.
        """
        self._whole, self._twice, self.store_step = tuple(tokens[-self._config.keep :]), twice, store_step

    def open(self, session: str, connection: AgentConnection, num_bytes: int, wait: AgentWait) -> None:
        """Have the agents make ready. num_bytes: of this rank's state. wait: for this node's folder.

        Raises:
            HpcTrainError: on every rank: some node has no such folder, or not the room, or cannot listen.
        """
        world = self._world
        told = world.control.all_gather([world.node_rank, num_bytes])
        secret = world.control.broadcast(secrets.token_hex(32) if world.rank == 0 else None)
        num_bytes_of = [0] * world.num_nodes
        for node, of_rank in told:
            num_bytes_of[node] += of_rank
        error: HpcTrainError | None = None
        listening: list[Any] | None = None
        if world.local_rank == 0:
            try:
                listening = self._keep(session, connection, secret, num_bytes_of, wait)
            except HpcTrainError as problem:
                error = problem
        world.agree(error)
        of_nodes = [entry for entry in world.control.all_gather(listening) if entry is not None]
        by_node = {node: (address, port) for node, address, port, _ in of_nodes}
        self._has_room = all(has_room for *_, has_room in of_nodes)
        if world.local_rank == 0 and world.num_nodes > 1:
            try:
                address, port = by_node[self._holders[world.node_rank]]
                _ask(connection, {"say": "copies.owner", "session": session, "address": address, "port": port})
            except HpcTrainError as problem:
                error = problem
        world.agree(error)
        self._session = session
        if world.rank == 0:
            of_others = "" if world.num_nodes == 1 else ", and each node keeps another one's"
            often = "each step" if self._config.every == 1 else f"every {self._config.every} steps"
            say(f"{often} the state is copied to {self._config.path} on each node{of_others}")

    def hear(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Learn from all agents' answers what has become of the copies of the save before. Not collective."""
        told = [answer["copies"] for answer in answers if answer.get("copies") is not None]
        whole, twice = _of_all(told, "whole_here"), _of_all(told, "kept_twice")
        if whole is not None and whole not in self._whole:
            self._whole = (*self._whole, whole)[-self._config.keep :]
        self._twice = twice or self._twice
        problem = next((entry["problem"] for entry in told if entry["problem"] is not None), None)
        if problem is None:
            self._warned_of = None if any(entry["whole_here"] for entry in told) else self._warned_of
        elif self._world.rank == 0 and self._warned_of is None:
            warn(f"copies on the nodes' own disks, which training goes on without: {problem}")
            self._warned_of = problem

    def order(self) -> dict[str, Any]:
        """What agents have to know to copy the save that begins. Not collective.

        Beside the newest whole saves the newest stays of which each part is on two nodes, where there is room: the
        others are lost with one disk.
        """
        keep = [*self._whole]
        if self._has_room and self._twice is not None and self._twice not in keep:
            keep.append(self._twice)
        return {"keep": keep, "store_step": self.store_step}

    def drop(self, agent: tuple[str, str]) -> None:
        """The store has all that the copies have: have them removed. Not collective.

        agent: job key and node of this node's, which does it; where it is gone, the first rank of the node does.
        """
        self._whole, self._twice = (), None
        if self._world.local_rank != 0:
            return
        # Not over the connection for saves, which is closed where the agent of any node has ended.
        message = {"say": "copies.drop", "session": self._session}
        told = None if self._session is None else ask_agent(*agent, message, timeout_s=_DROP_S)
        if told is None or "error" in told:
            self._remove()

    def _remove(self) -> None:
        """Remove this node's parts, and say so where they stay."""
        path, node = self.folder.path, self._world.node
        folder = NodeFolder(path, self.folder.attempt, self._world.node_rank, is_claimed=True)

        def remove() -> None:
            if path.is_dir():
                folder.keep_only(())

        try:
            bounded(folder.root, remove, "removing them", Bound(_ANSWER_S, "Look at that disk", tell=None))
        except (CheckpointError, OSError) as problem:
            warn(
                f"copies stay in {path} on {node}, though the store has all of them: {problem}. A next start of the "
                "run that makes copies there removes them; else remove the folder"
            )

    def _keep(
        self, session: str, connection: AgentConnection, secret: str, num_bytes_of: Sequence[int], wait: AgentWait
    ) -> list[Any]:
        world, config, here = self._world, self._config, self._world.node_rank
        has_peer = world.num_nodes > 1
        kept = self._holders.index(here) if has_peer else here
        address = self._address() if has_peer else ""
        message = {
            "say": "copies.keep",
            "session": session,
            "folder": str(self.folder.path),
            "attempt": self.folder.attempt,
            "node": here,
            "num_nodes": world.num_nodes,
            "own_bytes": num_bytes_of[here],
            "kept_node": kept,
            "kept_bytes": num_bytes_of[kept] if has_peer else 0,
            "address": address,
            "secret": secret,
            "keep": config.keep,
            "most_bytes": config.most_bytes,
            "bytes_per_s": config.send_bytes_per_s,
            "finish_s": self._finish_s,
        }
        answer = _ask(connection, message, wait)
        return [here, address, answer["port"], answer["has_room"]]


def _of_all(told: Sequence[Mapping[str, Any]], name: str) -> str | None:
    """The save that all nodes tell under a name; None where they do not tell one and the same."""
    words = {entry[name] for entry in told}
    return words.pop() if len(words) == 1 else None


def _ask(connection: AgentConnection, message: Mapping[str, Any], wait: AgentWait | None = None) -> dict[str, Any]:
    answer, _ = connection.ask(message, timeout_s=_ANSWER_S, look=None if wait is None else wait.look)
    if "error" in answer:
        raise CheckpointError(str(answer["error"]))
    return answer

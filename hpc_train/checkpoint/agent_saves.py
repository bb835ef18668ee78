"""Saves in two stages: ranks copy their state into kept memory and go on; the node agents write it to the store.

1. begin: every rank asks its agent whether the save before is done, and all ranks hear all answers
2. wait for it, or leave this save out, where it is not done on some node (checkpoint.when_busy)
3. copy (stage 1), and tell the agent, which writes (stage 2) whatever becomes of the ranks
4. settle, at the end or where somebody has to wait: the node's part is durable everywhere, then the commit
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from hpc_train.checkpoint.location import Location
from hpc_train.checkpoint.placed import PlacedBox
from hpc_train.checkpoint.snapshot import Snapshot
from hpc_train.checkpoint.state import StatePiece
from hpc_train.checkpoint.torch_files import index_bytes
from hpc_train.cluster.agent_address import AgentConnection, AgentGone
from hpc_train.cluster.memory_segment import Segment
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError, HpcTrainError
from hpc_train.log import say

_PATIENCE_S = 10.0
"""For an agent to come up; assumed: it was started with the ranks, and they have taken a step since."""
_OPEN_S = 60.0
"""For an agent to map the memory, which takes milliseconds; assumed: a node that swaps."""


class SaveFailed(CheckpointError):
    """The save of a step was not committed. Raised alike on every rank; rank 0 prints it."""

    reporter = 0

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"step {step} was not saved: {why}")
        self.step = step


@dataclass(frozen=True)
class AgentTarget:
    """What agents are told once: where checkpoints go, and as the configuration has them.

    note_dir: the run folder, where it has to be told of the newest step because checkpoints lie elsewhere.
    """

    root: Location
    keep: int
    bytes_per_s: float | None
    finish_s: float
    note_dir: Path | None

    def to_plain(self) -> dict[str, Any]:
        note_dir = str(self.note_dir) if self.note_dir is not None else None
        return {"root": str(self.root), "keep": self.keep, "bytes_per_s": self.bytes_per_s, "note_dir": note_dir}


@dataclass(frozen=True)
class Saved:
    """A save that is committed: its step, and how long training waited, and all of it took."""

    step: int
    stall_s: float
    seconds: float


@final
class AgentSaves:
    """One rank's part in saves that agents write. Methods are collective over all ranks unless they say otherwise."""

    def __init__(
        self,
        world: World,
        agent: tuple[str, str],
        target: AgentTarget,
        pieces: Sequence[StatePiece],
        report: Callable[[Saved], None],
    ) -> None:
        """Take the memory and have it mapped by the agent of this node.

        agent: its job key and node. report: called on rank 0, once for each save that is committed.

        Raises:
            HpcTrainError: on every rank: some node has no agent, or not the memory.
        """
        self._world, self._agent, self._report = world, agent, report
        self._session = str(world.control.broadcast(secrets.token_hex(4) if world.rank == 0 else None))
        self._num_begun = 0
        self._pending: _Pending | None = None
        self._connection: AgentConnection | None = None
        error: HpcTrainError | None = None
        try:
            self._connection = AgentConnection.open_patiently(*agent, _PATIENCE_S)
            self._snapshot = Snapshot(pieces, world.rank)
        except HpcTrainError as problem:
            error = problem
        self._agree(error)
        placed = world.control.all_gather([box.to_plain() for box in self._snapshot.placed])
        try:
            self._pass_on(target, placed)
        except HpcTrainError as problem:
            error = problem
        self._agree(error)

    def save(
        self, step: int, pieces: Sequence[StatePiece], values: Mapping[str, Any], when_busy: Literal["wait", "skip"]
    ) -> bool:
        """Copy the state and have it written; false where it is left out because the save before is not done.

        Raises:
            SaveFailed: the save before failed, and this one is not begun. Once for each.
            AgentGone: on every rank: an agent has ended.
        """
        begin = time.perf_counter()
        token = self._begin(step, when_busy)
        if token is None:
            if when_busy == "skip":
                return False
            self.settle()
            token = self._begin(step, when_busy)
            assert token is not None, "somebody else saves"
        self._snapshot.fill(pieces)
        message = {"say": "checkpoint.take", "token": token}
        # An agent that has ended is noticed by all together, at the next save.
        self._ask({**message, "values": values} if self._world.rank == 0 else message)
        self._pending = _Pending(token, step, time.perf_counter() - begin)
        if self._world.rank == 0:
            self._pending.listen(self._agent, self._session)
            say(f"step {step} is copied in {self._pending.stall_s:.2f} s; the node agents write it")
        return True

    def settle(self) -> None:
        """Wait until the last save is committed, if one is on its way.

        Raises:
            SaveFailed, AgentGone: as `save`.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        message = {"say": "checkpoint.wait", "session": self._session, "token": pending.token, "commit": False}
        answers = self._world.control.all_gather(self._ask(message))
        problem = next(filter(None, map(_problem, answers)), None)
        if self._world.rank == 0:
            if problem is not None:
                self._abandon(pending, problem)
            answers.append(pending.outcome())
        answers.append(self._world.control.broadcast(answers[-1]))
        _raise_where_gone(answers)
        problem = next(filter(None, map(_problem, answers)), None)
        if problem is not None:
            raise SaveFailed(pending.step, problem)
        self._tell(pending)

    def look(self) -> SaveFailed | None:
        """On rank 0: report what has become of the last save as soon as it is known. Not collective, never waits."""
        pending = self._pending
        if pending is None or pending.is_told or not pending.is_known:
            return None
        answer = pending.outcome()
        if "failed" not in answer:
            return None  # the agent has ended, which all notice together at the next save
        if answer["failed"] is None:
            self._tell(pending)
            return None
        pending.is_told = True
        return SaveFailed(pending.step, str(answer["failed"]))

    def close(self) -> None:
        """Leave the agent, which writes on. Not collective."""
        if self._connection is not None:
            self._connection.close()

    def _pass_on(self, target: AgentTarget, placed: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Give the agent this rank's memory, and on rank 0 torch's index of all ranks' boxes."""
        world, segments = self._world, [self._snapshot.segment]
        if world.rank == 0:
            index = index_bytes([PlacedBox.from_plain(box) for of_rank in placed for box in of_rank])
            segments.append(Segment.create("checkpoint.index", len(index)))
            segments[1].write(0, index)
        message = {
            "say": "checkpoint.open",
            "session": self._session,
            "rank": world.rank,
            "count": world.local_world_size,
            "node_rank": world.node_rank,
            "num_nodes": world.num_nodes,
            "target": target.to_plain(),
            "finish_s": target.finish_s,
            "placed": placed[world.rank],
            "offsets": self._snapshot.offsets,
        }
        assert self._connection is not None
        answer, _ = self._connection.ask(message, [segment.descriptor for segment in segments], timeout_s=_OPEN_S)
        for segment in segments:
            segment.close()
        if "error" in answer:
            raise CheckpointError(f"the node agent does not take the state: {answer['error']}")

    def _begin(self, step: int, when_busy: str) -> str | None:
        """The token of a save that is begun on every node; None where the one before is not done on some."""
        self._num_begun += 1
        token = f"{self._session}{self._num_begun:08x}"
        pending = self._pending
        answers = self._world.control.all_gather(self._ask({"say": "checkpoint.begin", "token": token, "step": step}))
        told = [answer["failed"] for answer in answers if answer.get("failed")]
        failed = [why for of_token, why in told if pending is not None and of_token == pending.token]
        busy = next((answer["busy"] for answer in answers if answer.get("busy")), None)
        is_gone = any("gone" in answer for answer in answers)
        if not (failed or busy or is_gone):
            if pending is not None:
                self._tell(pending)
            self._pending = None
            return token
        self._ask({"say": "checkpoint.cancel", "token": token})
        if pending is not None and (is_gone or failed):
            self._abandon(pending, failed[0] if failed else "the agent of another node has ended")
        _raise_where_gone(answers)
        if failed:
            assert pending is not None
            self._pending = None
            raise SaveFailed(pending.step, failed[0])
        if self._world.rank == 0:
            assert busy is not None
            action = "it is waited for" if when_busy == "wait" else "this one is left out (checkpoint.when_busy=skip)"
            written, whole = (f"{busy[name] / 2**20:.0f}" for name in ("written_bytes", "num_bytes"))
            so_far = f"{written} of {whole} MiB of a node"
            say(f"step {step}: the save of step {busy['step']} is not done, {so_far}: {action}")
        return None

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The agent's answer; `gone` with the reason where there is none, or it has lost what it was told."""
        assert self._connection is not None
        node = self._agent[1]
        try:
            answer, _ = self._connection.ask(message, timeout_s=0)
        except AgentGone as problem:
            return {"gone": f"{problem} (on {node})"}
        return {"gone": f"the node agent refuses: {answer['error']} (on {node})"} if "error" in answer else answer

    def _abandon(self, pending: _Pending, why: str) -> None:
        if self._world.rank == 0:
            self._ask({"say": "checkpoint.abandon", "token": pending.token, "reason": why})

    def _tell(self, pending: _Pending) -> None:
        if self._world.rank == 0 and not pending.is_told:
            pending.is_told = True
            self._report(Saved(pending.step, pending.stall_s, pending.stall_s + float(pending.outcome()["seconds"])))

    def _agree(self, error: HpcTrainError | None) -> None:
        try:
            self._world.agree(error)
        except HpcTrainError:
            self.close()
            raise


class _Pending:
    """A save on its way; on rank 0 a thread hears what becomes of it. is_told: somebody has been told of that."""

    def __init__(self, token: str, step: int, stall_s: float) -> None:
        self.token, self.step, self.stall_s = token, step, stall_s
        self.is_told = False
        self._answer: dict[str, Any] = {}
        self._thread: threading.Thread | None = None

    def listen(self, agent: tuple[str, str], session: str) -> None:
        """Begin to wait for the agent's last word."""
        message = {"say": "checkpoint.wait", "session": session, "token": self.token, "commit": True}

        def ask() -> None:
            try:
                connection = AgentConnection.open(*agent)
                self._answer, _ = connection.ask(message, timeout_s=0)
                connection.close()
            except AgentGone as problem:
                self._answer = {"gone": f"{problem} (on {agent[1]})"}

        self._thread = threading.Thread(target=ask, name=f"save of step {self.step}", daemon=True)
        self._thread.start()

    @property
    def is_known(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def outcome(self) -> dict[str, Any]:
        """The agent's last word, waiting for it."""
        assert self._thread is not None, "only rank 0 listens"
        self._thread.join()
        return self._answer


def _problem(answer: Mapping[str, Any]) -> str | None:
    """What went wrong by an agent's answer, or by its absence."""
    found = answer.get("gone") or answer.get("failed") or answer.get("error")
    return None if found is None else str(found)


def _raise_where_gone(answers: Sequence[Mapping[str, Any]]) -> None:
    for answer in answers:
        if "gone" in answer:
            raise AgentGone(str(answer["gone"]))

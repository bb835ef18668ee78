"""Saves in two stages: ranks copy their state into kept memory and go on; the node agents write it to the store.

1. begin: every rank asks its agent whether the save before is done, and all ranks hear all answers
2. wait for it, or leave this save out, where it is not done on some node (checkpoint.when_busy)
3. copy (stage 1), and tell the agent, which writes (stage 2) whatever becomes of the ranks
4. settle, at the end or where somebody has to wait: the node's part is durable everywhere, then the commit
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from hpc_train.checkpoint.copies.local_saves import LocalCopies
from hpc_train.checkpoint.folders.attempt import attempt_of
from hpc_train.checkpoint.format.placed import PlacedBox
from hpc_train.checkpoint.format.state import StatePiece
from hpc_train.checkpoint.format.torch_index import index_bytes
from hpc_train.checkpoint.saving.pending_save import (
    PATIENCE_S,
    PendingSave,
    poll,
    problem_of,
    progress_of,
    raise_where_gone,
    raise_where_stuck,
    says_committed,
)
from hpc_train.checkpoint.saving.snapshot import Snapshot, snapshot_bytes
from hpc_train.checkpoint.stores.location import Location
from hpc_train.cluster.agent_address import AgentConnection, AgentGone
from hpc_train.cluster.agent_wait import USUAL_LIMITS, AgentLimits, AgentWait, words_meanwhile
from hpc_train.cluster.limits import available_memory_bytes
from hpc_train.cluster.memory_segment import Segment
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError, HpcTrainError
from hpc_train.log import say, warn

_OPEN_S = 180.0
"""For an agent to map the memory and to see the store; assumed: that answers within its own patience, 120 s."""
_FOLDER_S = 60.0
"""For an agent to make a folder on its node's disk; assumed: a node that swaps."""


class SaveFailed(CheckpointError):
    """The save of a step was not committed. Raised alike on every rank; rank 0 prints it."""

    reporter = 0

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"step {step} was not saved: {why}")
        self.step, self.why = step, why


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
        limits: AgentLimits = USUAL_LIMITS,
    ) -> None:
        """Take the memory and have it mapped by the agent of this node.

        agent: its job key and node. report: called on rank 0, once for each save that is committed. limits: how long
        agents are waited for; the first rank of a node says so.

        Raises:
            HpcTrainError: on every rank: some node has no agent, or not the memory, or its agent not the store.
        """
        self._world, self._agent, self._report, self._limits = world, agent, report, limits
        self._root, self._speak = target.root, warn if world.local_rank == 0 else None
        self._session = str(world.control.broadcast(secrets.token_hex(4) if world.rank == 0 else None))
        self._num_begun = 0
        self._pending: PendingSave | None = None
        self._connection: AgentConnection | None = None
        self._gone: str | None = None
        self._lost_step: int | None = None
        self._snapshot: Snapshot | None = None
        self._copies: LocalCopies | None = None
        self._together(self._connect)
        self._check_memory(snapshot_bytes(pieces, world.rank))
        self._together(lambda: self._take_memory(pieces))
        assert self._snapshot is not None
        placed = world.control.gather([box.to_plain() for box in self._snapshot.placed])
        with self._trial(target.root) as trial:
            self._together(lambda: self._pass_on(target, placed, trial))

    def open_copies(self, copies: LocalCopies) -> None:
        """Have saves copied to the nodes' own disks too. Raises as `LocalCopies.open`."""
        assert self._connection is not None and self._snapshot is not None
        num_bytes = sum(box.item_bytes for box in self._snapshot.placed)

        def hangs(seconds: float) -> HpcTrainError:
            return CheckpointError(
                f"checkpoint.local.path: {copies.folder.path} has not answered the node agent of {self._agent[1]} in "
                f"{seconds:.0f} s: that disk hangs. Leave the node out, or checkpoint.local"
            )

        wait = self._wait("the folder of local copies", _FOLDER_S, hangs)
        copies.open(self._session, self._connection, num_bytes, wait)
        self._copies = copies

    def save(
        self,
        step: int,
        pieces: Sequence[StatePiece],
        values: Mapping[str, Any],
        when_busy: Literal["wait", "skip"],
        *,
        hurry: bool = False,
        is_for_store: bool = True,
        has_copy: bool = False,
    ) -> bool:
        """Copy the state and have it written; false where it is left out because the save before is not done.

        hurry: it and the one before are written without regard to checkpoint.write_bytes_per_s. is_for_store, has_copy:
        whether it is written to the store, and whether to the nodes' own disks.

        Raises:
            SaveFailed: the save before failed, and this one is not begun. Once for each.
            AgentGone: on every rank: an agent has ended or answers nothing, and nothing is written by the others any
                more.
            CheckpointError: on every rank: nothing gets on in the store.
        """
        assert self._snapshot is not None
        begin, before = time.perf_counter(), self._pending
        if before is not None:
            before.wait_from = begin
        while (token := self._begin(step, when_busy, hurry, is_for_store)) is None:
            if when_busy == "skip":
                if before is not None:
                    before.end_wait()
                return False
            self.settle()
        begin = begin if before is None else time.perf_counter()
        self._snapshot.fill(pieces)
        message = {"say": "checkpoint.take", "token": token, "is_for_store": is_for_store}
        if has_copy:
            assert self._copies is not None
            message["copy"] = self._copies.order()
        # An agent that has ended is noticed by all together, at the next save.
        self._ask({**message, "values": values} if self._world.rank == 0 else message)
        self._pending = PendingSave(token, step, time.perf_counter() - begin, is_for_store)
        if self._world.rank == 0 and is_for_store:
            self._pending.listen(self._agent, self._session, self._limits.silence_s)
            say(f"step {step} is copied in {self._pending.copy_s:.2f} s; the node agents write it")
        return True

    @property
    def pending_step(self) -> int | None:
        """The last step that was copied for the store and is not settled. Not collective."""
        return self._pending.step if self._pending is not None and self._pending.is_for_store else None

    @property
    def lost_step(self) -> int | None:
        """After AgentGone: the step whose save was given up, as far as the ranks know, and was not raised.

        Not collective, and the same on every rank.
        """
        return self._lost_step

    @property
    def is_writing(self) -> bool:
        """Whether a save is on its way, as far as this rank knows, and rank 0 knows best. Not collective."""
        return self._pending is not None and self._pending.is_for_store and self._pending.heard() is None

    def settle(self) -> None:
        """Wait until the last save is committed, if one is on its way, and no agent writes to the store any more.

        Raises:
            SaveFailed, AgentGone, CheckpointError: as `save`.
        """
        pending = self._pending
        if pending is None:
            return
        pending.wait_from = pending.wait_from or time.perf_counter()
        try:
            if pending.is_for_store:
                self._settle_store(pending)
            else:
                # Until agents copy it, which the next save may stop. Of one that has ended all hear at that save.
                raise_where_stuck(self._world.control.all_gather(self._outcome(pending, commit=True)))
        finally:
            self._pending = None

    def _settle_store(self, pending: PendingSave) -> None:
        answers = self._hear_all(self._outcome(pending, commit=False), pending.step)
        raise_where_stuck(answers)
        problem = next(filter(None, map(problem_of, answers)), None)
        if problem is not None:
            self._abandon(pending, problem)
        last = self._outcome(pending, commit=True) if self._world.rank == 0 else None
        last = self._world.control.broadcast(last)
        raise_where_stuck([last or {}])
        if says_committed(last):
            self._tell(pending, last)
            return  # an agent that has ended since is noticed at the next save
        if not pending.is_raised and any("gone" in answer for answer in [*answers, last]):
            self._lost_step = pending.step
        raise_where_gone([*answers, last])
        if not pending.is_raised:
            raise SaveFailed(pending.step, problem or str(problem_of(last)))

    def look(self) -> SaveFailed | None:
        """On rank 0: report what has become of the last save as soon as it is known. Not collective, never waits."""
        pending = self._pending
        if pending is None or pending.is_told or (answer := pending.heard()) is None:
            return None
        if says_committed(answer):
            self._tell(pending, answer)
            return None
        if "failed" not in answer:
            return None  # the agent has ended, which all notice together at the next save
        pending.is_told = True
        return SaveFailed(pending.step, str(answer["failed"]))

    def close(self) -> None:
        """Leave the agent, which writes on, and give the memory back. Not collective."""
        if self._connection is not None:
            self._connection.close()
        if self._snapshot is not None:
            self._snapshot.close()

    def _connect(self) -> None:
        self._connection = AgentConnection.open_patiently(*self._agent, PATIENCE_S)

    def _take_memory(self, pieces: Sequence[StatePiece]) -> None:
        self._snapshot = Snapshot(pieces, self._world.rank)

    def _check_memory(self, num_bytes: int) -> None:
        """Refuse what the node's ranks together do not get: the kernel would end one of them instead."""
        world = self._world
        told = world.control.all_gather([world.node_rank, num_bytes])
        of_node = [count for node_rank, count in told if node_rank == world.node_rank]

        def check() -> None:
            available = available_memory_bytes()
            if available is not None and sum(of_node) > available:
                raise CheckpointError(
                    f"{sum(of_node) / 2**20:.1f} MiB of memory for the copies of the {len(of_node)} ranks of "
                    f"{world.node} are not to be had: {available / 2**20:.1f} MiB are available there, within the "
                    "limits of the job. Give the job more memory (--mem)."
                )

        self._together(check)

    @contextmanager
    def _trial(self, root: Location) -> Iterator[str]:
        """The name of a file in the store by which agents see that they look at the same one."""
        name = f".trial.tmp-{self._session}"

        def put() -> None:
            if self._world.rank == 0:
                root.make_folder()
                (root / name).write_text("seen\n")

        try:
            self._together(put)
            yield name
        finally:
            if self._world.rank == 0:
                with suppress(CheckpointError, OSError):
                    (root / name).remove()

    def _pass_on(self, target: AgentTarget, placed: Sequence[Sequence[Mapping[str, Any]]] | None, trial: str) -> None:
        """Give the agent this rank's memory, and on rank 0 torch's index of all ranks' boxes."""
        world, snapshot, connection = self._world, self._snapshot, self._connection
        assert snapshot is not None and connection is not None
        segments = [snapshot.segment]
        message = {
            "say": "checkpoint.open",
            "session": self._session,
            "rank": world.rank,
            "count": world.local_world_size,
            "node_rank": world.node_rank,
            "num_nodes": world.num_nodes,
            "target": {**target.to_plain(), "attempt": attempt_of(self._agent[0])},
            "trial": trial,
            "finish_s": target.finish_s,
            "placed": [box.to_plain() for box in snapshot.placed],
            "offsets": snapshot.offsets,
        }
        try:
            if placed is not None:
                index = index_bytes([PlacedBox.from_plain(box) for of_rank in placed for box in of_rank])
                segments.append(Segment.create("checkpoint.index", len(index)))
                segments[1].write(0, index)
            wait = self._wait("its look at the store", _OPEN_S, self._sees_nothing)
            descriptors = [segment.descriptor for segment in segments]
            answer, _ = connection.ask(message, descriptors, timeout_s=self._limits.silence_s, look=wait.look)
        finally:
            for segment in segments:
                segment.close()
        if "error" in answer:
            raise CheckpointError(f"the node agent of {self._agent[1]} does not take the state: {answer['error']}")

    def _begin(self, step: int, when_busy: str, hurry: bool, is_for_store: bool) -> str | None:
        """The token of a save that is begun on every node; None where the one before is not done on some."""
        self._num_begun += 1
        token = f"{self._session}{self._num_begun:08x}"
        pending = self._pending
        asked = {"token": token, "step": step, "hurry": hurry, "is_for_store": is_for_store}
        message = {"say": "checkpoint.begin", **asked}
        answers = self._hear_all(self._ask(message), step)
        told = [answer["failed"] for answer in answers if answer.get("failed")]
        failed = [why for of_token, why in told if pending is not None and pending.is_failed_by(of_token)]
        busy = next((answer["busy"] for answer in answers if answer.get("busy")), None)
        is_gone = any("gone" in answer for answer in answers)
        is_news = bool(failed) and pending is not None and not pending.is_raised
        if self._copies is not None and is_for_store and not (is_news or busy or is_gone):
            # Only now, since a save that is left out stops no copies; and all of them, before any memory changes.
            answers = self._world.control.all_gather(self._ask({**message, "is_sure": True}))
            is_gone = any("gone" in answer for answer in answers)
        if not (is_news or busy or is_gone):
            if pending is not None and pending.is_for_store and not pending.is_raised:
                # All agents have said that they are done with it, and none that it failed.
                self._tell(pending, self._outcome(pending, commit=True) if self._world.rank == 0 else {})
            self._pending = None
            if self._copies is not None:
                self._copies.hear(answers)
            return token
        self._ask({"say": "checkpoint.cancel", "token": token})
        if pending is not None and (is_gone or is_news):
            self._abandon(pending, failed[0] if failed else "the agent of another node has ended")
        if is_gone:
            self._see_end(pending)
            raise_where_gone(answers)
        if is_news:
            assert pending is not None
            # It is no longer written soon, and not yet everywhere: the next save waits for that as for any other.
            pending.is_raised = True
            raise SaveFailed(pending.step, failed[0])
        if self._world.rank == 0:
            assert busy is not None
            left_out = "this one is left out (checkpoint.when_busy=skip)" if is_for_store else "there is no local copy"
            action = "it is waited for" if when_busy == "wait" else left_out
            written, whole = (f"{busy[name] / 2**20:.1f}" for name in ("written_bytes", "num_bytes"))
            so_far = f"{written} of {whole} MiB of a node"
            say(f"step {step}: the save of step {busy['step']} is not done, {so_far}: {action}")
        return None

    def _see_end(self, pending: PendingSave | None) -> None:
        """Wait until no agent that lives writes or commits any more: the ranks may use the same folder then."""
        last = {} if pending is None else self._outcome(pending, commit=True)
        is_committed, *_ = self._world.control.all_gather(says_committed(last))  # rank 0's agent commits
        if pending is None or not pending.is_for_store:
            return
        if is_committed:
            self._tell(pending, last)
        elif not pending.is_raised:
            self._lost_step = pending.step

    def _outcome(self, pending: PendingSave, *, commit: bool) -> dict[str, Any]:
        """What has become of a save at this rank's agent, waiting for it (see `node_writer`). Not collective."""
        if commit and pending.is_committed:
            return {"is_known": True, "failed": None, "seconds": 0.0}
        message = {"say": "checkpoint.outcome", "session": self._session, "token": pending.token, "commit": commit}

        def sticks(seconds: float) -> HpcTrainError:
            return CheckpointError(
                f"the save of step {pending.step} does not get on: the node agent of {self._agent[1]} lives, but "
                f"nothing has moved for {seconds:.0f} s{progress_of(answer)}, so {self._root} does not answer there. "
                "What was saved before stands. Look at the file system; one call of it may take launch.timeout_s and "
                "two minutes"
            )

        answer: dict[str, Any] = {}
        wait = self._wait(f"the save of step {pending.step}", self._limits.save_s, sticks)

        def ask() -> dict[str, Any]:
            nonlocal answer
            answer = self._ask(message)
            if not answer.get("is_known", True):
                wait.look(True, answer.get("moved"), progress_of(answer))
            return answer

        try:
            return poll(ask)
        except CheckpointError as problem:
            return {"stuck": str(problem)}

    def _hear_all(self, answer: dict[str, Any], step: int) -> list[dict[str, Any]]:
        """All ranks' answers. Collective."""
        tell = self._speak if self._world.rank == 0 and self._world.num_nodes > 1 else None
        what = f"ranks of other nodes at the save of step {step}, which may wait for their node agents (logs/NODE.log)"
        with words_meanwhile(tell, what):
            return self._world.control.all_gather(answer)

    def _wait(self, what: str, hang_s: float, hangs: Callable[[float], HpcTrainError]) -> AgentWait:
        """One for what the agent says later, and is asked meanwhile whether it lives."""
        return AgentWait(self._agent, what, self._limits.silence_s, self._speak, hang_s=hang_s, hangs=hangs)

    def _sees_nothing(self, seconds: float) -> HpcTrainError:
        return CheckpointError(f"{self._root} does not answer the node agent of {self._agent[1]} in {seconds:.0f} s")

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The agent's answer; `gone` with the reason where there is none, or it has lost what it was told."""
        assert self._connection is not None
        node, silence_s = self._agent[1], self._limits.silence_s
        if self._gone is None:
            # Answers to these wait for nothing, so that there is no need to ask for a sign of life.
            wait = AgentWait(self._agent, "an answer about checkpoints", silence_s, self._speak)
            try:
                answer, _ = self._connection.ask(message, timeout_s=silence_s, look=lambda: wait.look(answers=False))
                if "error" not in answer:
                    return answer
                return {"gone": f"the node agent refuses: {answer['error']} (on {node})"}
            except AgentGone as problem:
                # An answer that came late would be taken for that of the next question.
                self._connection.close()
                self._gone = str(problem) if f"agent of {node}" in str(problem) else f"{problem} (on {node})"
        return {"gone": self._gone}

    def _abandon(self, pending: PendingSave, why: str) -> None:
        self._ask({"say": "checkpoint.abandon", "token": pending.token, "reason": why})

    def _tell(self, pending: PendingSave, answer: Mapping[str, Any]) -> None:
        pending.is_committed = True
        if self._world.rank == 0 and not pending.is_told:
            pending.is_told = True
            for line in answer.get("told", ()):
                warn(str(line))
            # An agent that ends in this moment does not tell its time any more; the save is committed all the same.
            seconds = pending.copy_s + float(answer.get("seconds", time.perf_counter() - pending.copied_at))
            stall_s = pending.stall_s
            self._report(Saved(pending.step, stall_s, max(stall_s, seconds)))

    def _together(self, act: Callable[[], None]) -> None:
        """Do what may fail on some ranks; where it does on any, all raise alike and hold nothing any more."""
        error: HpcTrainError | None = None
        try:
            act()
        except HpcTrainError as problem:
            error = problem
        except Exception as problem:
            # Not raised as it is: one rank would end by what all can do without.
            error = CheckpointError(f"{type(problem).__name__}: {problem}")
            error.__cause__ = problem
        try:
            self._world.agree(error)
        except HpcTrainError:
            self.close()
            raise

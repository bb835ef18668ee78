"""Saves in two stages: ranks copy their state into kept memory and go on; the node agents write it to the store.

1. begin: every rank asks its agent whether the save before is done, and all ranks hear all answers
2. wait for it, or leave this save out, where it is not done on some node (checkpoint.when_busy)
3. copy (stage 1), and tell the agent, which writes (stage 2) whatever becomes of the ranks
4. settle, at the end or where somebody has to wait: the node's part is durable everywhere, then the commit
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from hpc_train.checkpoint.copies.local_saves import LocalCopies
from hpc_train.checkpoint.format.state import StatePiece
from hpc_train.checkpoint.saving.agent_link import AgentLink
from hpc_train.checkpoint.saving.pending_save import (
    PendingSave,
    poll,
    problem_of,
    progress_of,
    raise_where_gone,
    raise_where_stuck,
    says_committed,
)
from hpc_train.checkpoint.saving.shared_memory import AgentTarget, share_memory
from hpc_train.cluster.agent_wait import USUAL_LIMITS, AgentLimits
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError, HpcTrainError
from hpc_train.log import say, warn

_FOLDER_S = 60.0
"""For an agent to make a folder on its node's disk; assumed: a node that swaps."""


class SaveFailed(CheckpointError):
    """The save of a step was not committed. Raised alike on every rank; rank 0 prints it."""

    reporter = 0

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"step {step} was not saved: {why}")
        self.step, self.why = step, why


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
        self._world, self._report, self._root = world, report, target.root
        self._num_begun = 0
        self._pending: PendingSave | None = None
        self._lost_step: int | None = None
        self._copies: LocalCopies | None = None
        self._link = AgentLink(world, agent, limits)
        self._snapshot = share_memory(self._link, target, pieces)

    def open_copies(self, copies: LocalCopies) -> None:
        """Have saves copied to the nodes' own disks too. Raises as `LocalCopies.open`."""
        num_bytes = sum(box.item_bytes for box in self._snapshot.placed)

        def hangs(seconds: float) -> HpcTrainError:
            return CheckpointError(
                f"checkpoint.local.path: {copies.folder.path} has not answered the node agent of {self._link.node} in "
                f"{seconds:.0f} s: that disk hangs. Leave the node out, or checkpoint.local"
            )

        wait = self._link.wait("the folder of local copies", _FOLDER_S, hangs)
        copies.open(self._link.session, self._link.connection, num_bytes, wait)
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
        self._link.ask({**message, "values": values} if self._world.rank == 0 else message)
        self._pending = PendingSave(token, step, time.perf_counter() - begin, is_for_store)
        if self._world.rank == 0 and is_for_store:
            self._link.listen(self._pending)
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
        answers = self._link.hear_all(self._outcome(pending, commit=False), pending.step)
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
        self._link.close()
        self._snapshot.close()

    def _begin(self, step: int, when_busy: str, hurry: bool, is_for_store: bool) -> str | None:
        """The token of a save that is begun on every node; None where the one before is not done on some."""
        self._num_begun += 1
        token = f"{self._link.session}{self._num_begun:08x}"
        pending = self._pending
        asked = {"token": token, "step": step, "hurry": hurry, "is_for_store": is_for_store}
        message = {"say": "checkpoint.begin", **asked}
        answers = self._link.hear_all(self._link.ask(message), step)
        told = [answer["failed"] for answer in answers if answer.get("failed")]
        failed = [why for of_token, why in told if pending is not None and pending.is_failed_by(of_token)]
        busy = next((answer["busy"] for answer in answers if answer.get("busy")), None)
        is_gone = any("gone" in answer for answer in answers)
        is_news = bool(failed) and pending is not None and not pending.is_raised
        if self._copies is not None and is_for_store and not (is_news or busy or is_gone):
            # Only now, since a save that is left out stops no copies; and all of them, before any memory changes.
            answers = self._world.control.all_gather(self._link.ask({**message, "is_sure": True}))
            is_gone = any("gone" in answer for answer in answers)
        if not (is_news or busy or is_gone):
            if pending is not None and pending.is_for_store and not pending.is_raised:
                # All agents have said that they are done with it, and none that it failed.
                self._tell(pending, self._outcome(pending, commit=True) if self._world.rank == 0 else {})
            self._pending = None
            if self._copies is not None:
                self._copies.hear(answers)
            return token
        self._link.ask({"say": "checkpoint.cancel", "token": token})
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
        message = {"say": "checkpoint.outcome", "session": self._link.session, "token": pending.token, "commit": commit}

        def sticks(seconds: float) -> HpcTrainError:
            return CheckpointError(
                f"the save of step {pending.step} does not get on: the node agent of {self._link.node} lives, but "
                f"nothing has moved for {seconds:.0f} s{progress_of(answer)}, so {self._root} does not answer there. "
                "What was saved before stands. Look at the file system; one call of it may take launch.timeout_s and "
                "two minutes"
            )

        answer: dict[str, Any] = {}
        wait = self._link.wait(f"the save of step {pending.step}", self._link.limits.save_s, sticks)

        def ask() -> dict[str, Any]:
            nonlocal answer
            answer = self._link.ask(message)
            if not answer.get("is_known", True):
                wait.look(True, answer.get("moved"), progress_of(answer))
            return answer

        try:
            return poll(ask)
        except CheckpointError as problem:
            return {"stuck": str(problem)}

    def _abandon(self, pending: PendingSave, why: str) -> None:
        self._link.ask({"say": "checkpoint.abandon", "token": pending.token, "reason": why})

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

"""Reads a node's part of each step once, for all its ranks, into shared memory: what the node agent does for data.

1. open: each rank of the node says what is read and which place it has; the datasets are opened once
2. restore: the position of a checkpoint, if there is one
3. step: a thread plans and reads the steps ahead; each is one segment that all ranks of the node map, read-only, and it
   is gone when the last of them has dropped it

Ranks that need no tokens (pipeline stages in the middle) get what is to be known of their micro-batches and no segment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, final

from hpc_train.cluster.agent_service import Peer, Service, error_answer
from hpc_train.errors import HpcTrainError

if TYPE_CHECKING:
    from hpc_train.data.node_steps import NodeSteps, PreparedStep
    from hpc_train.data.steps import Step

STEPS_AHEAD = 2
"""Read before they are asked for: while one is taken, the next is whole and the one after it is being read."""
_STEPS_AT_ONCE = STEPS_AHEAD + 2
"""In memory at the most: one more that ranks hold, and one that is being filled."""


@final
@dataclass(frozen=True)
class _Member:
    """A rank of the node: where it stands on the dp axis, and whether it needs tokens."""

    index: int
    place: int
    wants_tokens: bool


@dataclass
class _Stream:
    """Numbered steps that are read in order. next: the next to be read. asked: the highest that a rank asked for.

    last: the last that there is, where that is known. ready: those that were read and not yet taken by all. source: of
    held-out rows, what is left of them.
    """

    next: int
    asked: int
    last: int | None
    ready: dict[int, PreparedStep] = field(default_factory=dict)
    source: Iterator[Step] | None = None

    @property
    def is_due(self) -> bool:
        ahead = self.next <= self.asked + STEPS_AHEAD
        return ahead and (self.last is None or self.next <= self.last)

    def close(self) -> None:
        for step in self.ready.values():
            step.close()
        self.ready.clear()


@final
class DataService(Service):
    """`data.open`, `data.restore`, `data.step`, `data.heldout`: see `Session`."""

    name = "data"

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._sessions: dict[str, Session] = {}
        self._session_of: dict[Peer, Session] = {}

    def answer(self, peer: Peer, message: Mapping[str, Any], descriptors: Sequence[int]) -> Mapping[str, Any] | None:
        verb = str(message["say"]).partition(".")[2]
        if verb == "open":
            self._open(peer, message)
            return None
        session = self._session_of.get(peer)
        if session is None:
            raise ValueError("data.open comes first")
        if verb == "restore":
            session.restore(peer, message["state"])
        elif verb == "step":
            session.step(peer, int(message["number"]))
        elif verb == "heldout":
            session.heldout(peer, int(message["evaluation"]), int(message["number"]))
        else:
            raise ValueError(f"unknown message data.{verb}; known are data.open, restore, step and heldout")
        return None

    def gone(self, peer: Peer) -> None:
        session = self._session_of.pop(peer, None)
        if session is not None and not session.leave(peer):
            self._sessions.pop(session.name, None)

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()

    def _open(self, peer: Peer, message: Mapping[str, Any]) -> None:
        name = str(message["session"])
        member = _Member(int(message["index"]), int(message["place"]), bool(message["wants_tokens"]))
        session = self._sessions.get(name)
        if session is None:
            session = Session(name, message["spec"], int(message["count"]), self._log)
            self._sessions[name] = session
        session.join(peer, member, message["spec"])
        self._session_of[peer] = session


@final
class Session:
    """One start of a run on this node: its ranks, and a thread that reads for them.

    Messages are taken by the agent's thread and answered at once where a step is ready, else by the reading thread.
    An error of the reading is the answer to everything that is asked from then on, also to what was read ahead, and who
    asks is forgotten only once answered: so it reaches every rank.
    """

    def __init__(self, name: str, spec: Mapping[str, Any], count: int, log: Callable[[str], None]) -> None:
        """count: ranks on this node; nothing is read before all have come, since what they need is not known."""
        self.name = name
        self._spec, self._count, self._log = spec, count, log
        self._changed = threading.Condition()
        self._members: dict[Peer, _Member] = {}
        self._joined: dict[int, _Member] = {}
        self._to_open: list[Peer] = []
        self._to_restore: list[tuple[Peer, Mapping[str, Any]]] = []
        self._restored: tuple[Mapping[str, Any], dict[str, Any]] | None = None
        self._training: _Stream | None = None
        self._evaluation = 0
        self._heldout = _Stream(0, -1 - STEPS_AHEAD, None)
        self._waiting: list[tuple[Peer, _Stream, int]] = []
        self._failure: dict[str, Any] | None = None
        self._is_closed = False
        threading.Thread(target=self._run, name=f"data {name}", daemon=True).start()

    def join(self, peer: Peer, member: _Member, spec: Mapping[str, Any]) -> None:
        """A rank has come; it is answered when the datasets are open."""
        with self._changed:
            if spec != self._spec:
                raise ValueError("the ranks of this node ask for different data: they do not belong to one start")
            if member.index in self._joined or not 0 <= member.index < self._count:
                raise ValueError(f"rank {member.index} of {self._count} on this node has come already, or is none")
            self._members[peer] = self._joined[member.index] = member
            if not self._has_failed_for(peer):
                self._to_open.append(peer)
                self._changed.notify()

    def restore(self, peer: Peer, state: Mapping[str, Any]) -> None:
        """Begin at a saved position; the first rank's is taken, and the others' must be the same."""
        with self._changed:
            if not self._has_failed_for(peer):
                self._to_restore.append((peer, state))
                self._changed.notify()

    def step(self, peer: Peer, number: int) -> None:
        """A step of training; the first that is asked for is the one behind the position."""
        with self._changed:
            if self._has_failed_for(peer):
                return
            if self._training is None:
                self._training = _Stream(number, number, int(self._spec["train"]["steps"]))
            self._give_or_wait(peer, self._training, number)

    def heldout(self, peer: Peer, evaluation: int, number: int) -> None:
        """A step of the held-out rows, from 0 on in each evaluation; after the last one comes the end."""
        with self._changed:
            if self._has_failed_for(peer):
                return
            if evaluation > self._evaluation:
                self._heldout.close()
                self._evaluation, self._heldout = evaluation, _Stream(0, 0, None)
            elif evaluation < self._evaluation:
                raise ValueError(f"evaluation {evaluation} is over: evaluation {self._evaluation} has begun")
            self._give_or_wait(peer, self._heldout, number)

    def leave(self, peer: Peer) -> bool:
        """A rank has gone; true while others are left."""
        with self._changed:
            member = self._members.pop(peer)
            self._waiting = [entry for entry in self._waiting if entry[0] is not peer]
            for stream in filter(None, (self._training, self._heldout)):
                for number in tuple(stream.ready):
                    self._mark_taken(stream, number, member.index)
            if not self._members:
                self.close()
            return bool(self._members)

    def close(self) -> None:
        """End the thread and drop what it has read."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _give_or_wait(self, peer: Peer, stream: _Stream, number: int) -> None:
        if number < stream.next and number not in stream.ready:
            raise ValueError(f"step {number} was given already; the next is {stream.next}")
        stream.asked = max(stream.asked, number)
        if number in stream.ready:
            self._give(peer, stream, number)
        else:
            self._waiting.append((peer, stream, number))
        self._changed.notify()

    def _has_failed_for(self, peer: Peer) -> bool:
        """Looked at before all else: where the reading has failed, its error is this rank's answer.

        What was read ahead is closed with it, so that what is asked for cannot be judged by what is there.
        """
        if self._failure is None:
            return False
        peer.send(self._failure)
        return True

    def _give(self, peer: Peer, stream: _Stream, number: int) -> None:
        member = self._members[peer]
        step = stream.ready[number]
        descriptors = [step.segment.descriptor] if step.segment is not None and member.wants_tokens else []
        peer.send(step.message_for(member.place, with_tokens=bool(descriptors)), descriptors)
        self._mark_taken(stream, number, member.index)

    def _mark_taken(self, stream: _Stream, number: int, index: int) -> None:
        step = stream.ready[number]
        step.not_taken.discard(index)
        if not step.not_taken:
            del stream.ready[number]
            step.close()

    def _run(self) -> None:
        """The reading thread."""
        begin = time.monotonic()
        try:
            from hpc_train.data.node_steps import NodeSteps  # NumPy, which other agents never need

            reader = NodeSteps(self._spec, _STEPS_AT_ONCE)
        except Exception as problem:
            self._fail(problem)
            return
        self._log(f"data: {reader.describe()}, opened in {time.monotonic() - begin:.2f} s")
        try:
            while (task := self._next_task()) is not None:
                task(reader)
        except Exception as problem:
            self._fail(problem)
        finally:
            self._log(f"data: {reader.summary()}")
            reader.close()
            with self._changed:
                for stream in filter(None, (self._training, self._heldout)):
                    stream.close()

    def _next_task(self) -> Callable[[NodeSteps], None] | None:
        """What to do next, waiting for it; None at the end."""
        with self._changed:
            while not self._is_closed:
                is_complete = len(self._joined) == self._count
                if self._to_open:
                    return self._open
                if self._to_restore:
                    return self._restore_next
                if is_complete and self._heldout.is_due:
                    return partial(self._read_heldout, self._heldout)
                if is_complete and self._training is not None and self._training.is_due:
                    return partial(self._read_training, self._training)
                self._changed.wait()
        return None

    def _open(self, reader: NodeSteps) -> None:
        answer = {"has_heldout": reader.has_heldout, "state": reader.state()}
        with self._changed:
            peers, self._to_open = self._to_open, []
        for peer in peers:
            peer.send(answer)

    def _read_training(self, stream: _Stream, reader: NodeSteps) -> None:
        self._put(stream, reader.prepare(stream.next, tuple(self._joined.values())))

    def _read_heldout(self, stream: _Stream, reader: NodeSteps) -> None:
        stream.source = reader.heldout_steps() if stream.source is None else stream.source
        self._put(stream, reader.prepare_heldout(next(stream.source, None), tuple(self._joined.values())))

    def _restore_next(self, reader: NodeSteps) -> None:
        with self._changed:
            peer, state = self._to_restore[0]
        answer = self._restore(reader, state)
        with self._changed:
            del self._to_restore[0]
        peer.send(answer)

    def _restore(self, reader: NodeSteps, state: Mapping[str, Any]) -> dict[str, Any]:
        if self._restored is not None and self._restored[0] == state:
            return self._restored[1]
        if self._restored is not None or self._training is not None:
            return error_answer(ValueError("the data has another position already, or is being read from it"))
        try:
            answer: dict[str, Any] = {"changes": reader.restore(state), "state": reader.state()}
        except HpcTrainError as problem:
            answer = error_answer(problem)
        self._restored = (state, answer)
        return answer

    def _put(self, stream: _Stream, step: PreparedStep) -> None:
        """A step is ready: give it to those who wait for it."""
        with self._changed:
            number = stream.next
            step.not_taken = {member.index for member in self._members.values()}
            stream.next += 1
            if step.is_end:
                stream.last = number
            if not step.not_taken or (stream is not self._training and stream is not self._heldout):
                step.close()
                return
            stream.ready[number] = step
            for entry in [entry for entry in self._waiting if entry[1] is stream and entry[2] == number]:
                self._give(entry[0], stream, number)
                self._waiting.remove(entry)

    def _fail(self, problem: BaseException) -> None:
        """Answer all who wait, and whoever asks later, with an error."""
        kind = "" if isinstance(problem, HpcTrainError) else f"{type(problem).__name__}: "
        self._log(f"data: reading has failed: {kind}{problem}")
        with self._changed:
            self._failure = error_answer(problem)
            waiting = [*self._to_open, *(peer for peer, _ in self._to_restore), *(entry[0] for entry in self._waiting)]
            self._to_open, self._to_restore, self._waiting = [], [], []
            for peer in waiting:
                peer.send(self._failure)

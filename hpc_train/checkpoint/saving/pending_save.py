"""A save that a rank has handed to its agent and not settled, and what agents' answers about saves mean."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from hpc_train.cluster.agent_address import AgentConnection, AgentGone
from hpc_train.errors import CheckpointError

PATIENCE_S = 10.0
"""For an agent to come up; assumed: it was started with the ranks, and they have taken a step since."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_SHARE = 0.005, 0.5, 0.005
"""Between questions whether a save is done: a share of the time that it has taken so far (assumed: by so much, twice,
the end of a save is noticed late)."""


class PendingSave:
    """A save on its way; on rank 0 a thread hears what becomes of it.

    is_for_store: as of `save`. copied_at: on the clock of time.perf_counter, as is wait_from: since when training waits
    for it, if it does. is_told: somebody has been told of its end. is_committed: it is known to be. is_raised: its
    failure was raised on every rank, and agents may still be about to end it.
    """

    def __init__(self, token: str, step: int, copy_s: float, is_for_store: bool) -> None:
        self.token, self.step, self.copy_s, self.is_for_store = token, step, copy_s, is_for_store
        self.copied_at = time.perf_counter()
        self.wait_from: float | None = None
        self._waited_s = 0.0
        self.is_told = self.is_raised = self.is_committed = False
        self._heard: dict[str, Any] | None = None

    @property
    def stall_s(self) -> float:
        """How long training has waited for it, for its copy and later."""
        waits_s = 0.0 if self.wait_from is None else time.perf_counter() - self.wait_from
        return self.copy_s + self._waited_s + waits_s

    def end_wait(self) -> None:
        """Training goes on without it."""
        self._waited_s, self.wait_from = self.stall_s - self.copy_s, None

    def is_failed_by(self, token: str) -> bool:
        """Whether a failure of that save is one of this one, and of the store."""
        return self.is_for_store and token == self.token

    def listen(self, agent: tuple[str, str], session: str, silence_s: float) -> None:
        """Begin to wait for the agent's last word. silence_s: for each of its answers."""
        message = {"say": "checkpoint.outcome", "session": session, "token": self.token, "commit": True}

        def ask() -> None:
            try:
                with closing(AgentConnection.open_patiently(*agent, PATIENCE_S)) as connection:
                    self._heard = poll(lambda: connection.ask(message, timeout_s=silence_s)[0])
            except AgentGone as problem:
                self._heard = {"gone": f"{problem} (on {agent[1]})"}

        threading.Thread(target=ask, name=f"save of step {self.step}", daemon=True).start()

    def heard(self) -> dict[str, Any] | None:
        """The agent's last word, if it has come."""
        return self._heard


def poll(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Ask for an outcome until it is known, or nobody answers."""
    begin = time.monotonic()
    while not (answer := ask()).get("is_known", True):
        pause_s = _PAUSE_SHARE * (time.monotonic() - begin)
        time.sleep(min(max(pause_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
    return answer


def says_committed(answer: Mapping[str, Any]) -> bool:
    return "seconds" in answer and answer["failed"] is None


def problem_of(answer: Mapping[str, Any]) -> str | None:
    """What went wrong by an agent's answer, or by its absence."""
    found = answer.get("gone") or answer.get("failed")
    return None if found is None else str(found)


def progress_of(answer: Mapping[str, Any]) -> str:
    """How far a save is, by its agent's answer."""
    if "num_bytes" not in answer:
        return ""
    written, whole = (answer[name] / 2**20 for name in ("written_bytes", "num_bytes"))
    return f" ({written:.1f} of {whole:.1f} MiB written)"


def raise_where_stuck(answers: Sequence[Mapping[str, Any]]) -> None:
    stuck = next((answer["stuck"] for answer in answers if "stuck" in answer), None)
    if stuck is not None:
        error = CheckpointError(stuck)
        error.reporter = 0
        raise error


def raise_where_gone(answers: Sequence[Mapping[str, Any]]) -> None:
    for answer in answers:
        if "gone" in answer:
            raise AgentGone(str(answer["gone"]))

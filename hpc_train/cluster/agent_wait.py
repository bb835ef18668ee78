"""How long a rank waits for its node agent, and what is said meanwhile."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from hpc_train.cluster.agent_address import AgentGone, ask_agent
from hpc_train.errors import HpcTrainError
from hpc_train.log import warn

LOOK_S = 1.0
"""Between looks whether a word is due (assumed)."""
_ANSWER_S = 1.0
"""For an answer to the question whether it lives; assumed as below."""
LONGEST_GAP_S = 3.0
"""Between looks at a wait, which come each second, with an answer that is waited for between them."""
_FIRST_WORD_S, _LONGEST_PAUSE_S = 5.0, 300.0
"""Assumed: what takes less is not worth a line, and who looks at a log sees one within minutes."""
_SILENCE_S = 60.0
"""Assumed: an agent answers in milliseconds, and on a node that swaps in seconds; one that is stopped never does."""
_DATA_SHARE = 0.8
"""Of launch.timeout_s: the rank that waits for its agent names it before the ranks that wait for this one give up."""
_STORE_S = 120.0
"""How long a store that does not answer is asked again before its own error comes, which says more."""


@final
@dataclass(frozen=True)
class AgentLimits:
    """How long ranks wait for their node agent.

    silence_s: where it answers nothing at all. data_s: where it answers, but has not read what is asked for. save_s:
    where it answers, but nothing of a save gets on.
    """

    silence_s: float
    data_s: float
    save_s: float

    @classmethod
    def within(cls, timeout_s: float) -> AgentLimits:
        """For ranks that wait for each other for timeout_s (launch.timeout_s)."""
        return cls(min(_SILENCE_S, timeout_s / 2), _DATA_SHARE * timeout_s, timeout_s + _STORE_S)


USUAL_LIMITS = AgentLimits.within(600.0)
"""With the default of launch.timeout_s."""


@final
class Words:
    """Lines about one wait: the first after some seconds, then ever more rarely."""

    def __init__(self, tell: Callable[[str], None] | None, clock: Callable[[], float] = time.monotonic) -> None:
        """tell: None: nothing is said, as where another rank of the node says it."""
        self._tell, self._clock = tell, clock
        self._begin = clock()
        self._next_s = _FIRST_WORD_S

    def look(self, what: str) -> None:
        """what: is waited for, and how far that is."""
        waited_s = self._clock() - self._begin
        if self._tell is not None and waited_s >= self._next_s:
            self._next_s = waited_s + min(waited_s, _LONGEST_PAUSE_S)
            self._tell(f"has waited {waited_s:.0f} s so far for {what}")


@contextmanager
def words_meanwhile(tell: Callable[[str], None] | None, what: str) -> Iterator[None]:
    """Say now and then what is waited for, where the wait inside gives no chance to. tell: as of `Words`."""
    if tell is None:
        yield
        return
    words, over = Words(tell), threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            words.look(what)

    threading.Thread(target=look, name="words", daemon=True).start()
    try:
        yield
    finally:
        over.set()


@final
class AgentWait:
    """One wait for the agent of this node, to be looked at about every second."""

    def __init__(
        self,
        agent: tuple[str, str],
        what: str,
        silence_s: float,
        tell: Callable[[str], None] | None = warn,
        *,
        hang_s: float = math.inf,
        hangs: Callable[[float], HpcTrainError] = lambda seconds: AgentGone(f"nothing has moved for {seconds:.0f} s"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """agent: its job key and node. what: is waited for. tell: as of `Words`.

        silence_s: for an agent that answers nothing. hang_s: for one that answers, while nothing moves; `hangs` makes
        the error of the seconds that this took.
        """
        self._agent, self._what, self._hangs = agent, what, hangs
        self._silence_s, self._hang_s = silence_s, hang_s
        self._words, self._clock = Words(tell, clock), clock
        self._looked_at = clock()
        self._silent_s = self._still_s = 0.0
        self._moved: object = None

    def look(self, answers: bool | None = None, moved: object = None, so_far: str = "") -> None:
        """Say a word where it is time, and end a wait that is of no use.

        answers: whether the agent has just said something; None: it is asked. moved: changes as what is waited for gets
        on. so_far: how far that is, in words.

        Raises:
            AgentGone: it has answered nothing for too long.
            HpcTrainError: as `hangs`, where nothing has moved for too long.
        """
        answers = is_answering(self._agent) if answers is None else answers
        now = self._clock()
        # A node that was suspended as a whole wakes up at no time of its own: long gaps are not the agent's.
        passed_s, self._looked_at = min(now - self._looked_at, LONGEST_GAP_S), now
        self._silent_s = 0.0 if answers else self._silent_s + passed_s
        self._still_s = self._still_s + passed_s if moved == self._moved else 0.0
        self._moved = moved
        node = self._agent[1]
        if self._silent_s >= self._silence_s:
            raise AgentGone(
                f"the node agent of {node} has answered nothing for {self._silent_s:.0f} s (waiting for {self._what}): "
                "its process is stopped, or the node hangs"
            )
        if self._still_s >= self._hang_s:
            raise self._hangs(self._still_s)
        silent = f", which answers nothing (process stopped?) and is given up after {self._silence_s:.0f} s of that"
        self._words.look(f"{self._what}, from the node agent of {node}{so_far if answers else silent}")


def is_answering(agent: tuple[str, str]) -> bool:
    """Whether an agent answers at this moment, whatever else it has to do."""
    return ask_agent(*agent, {"say": "status"}, timeout_s=_ANSWER_S) is not None

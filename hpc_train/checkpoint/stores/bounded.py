"""Work on a store that may hang, as a file system does that neither answers nor fails: bounded, and in words."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import TypeVar, final

from hpc_train.checkpoint.stores.location import Location
from hpc_train.checkpoint.stores.store import Cause, StoreError
from hpc_train.cluster.agent_wait import LONGEST_GAP_S, LOOK_S, Words
from hpc_train.log import warn

T = TypeVar("T")

_HANGS = Cause("the store does not answer", True, "Look at the file system")


@final
class StoreWait:
    """One wait for another thread's work on stores, to be looked at about every second (`LOOK_S`)."""

    def __init__(
        self, places: Collection[Location], what: str, hang_s: float, tell: Callable[[str], None] | None = warn
    ) -> None:
        """places: where it works; the first one is named. what: is waited for. tell: as of `Words`.

        hang_s: how long nothing may move in any of the stores.
        """
        self._place = next(iter(places))
        self._stores = [place.store for place in places]
        self._what, self._hang_s, self._words = what, hang_s, Words(tell)
        self._looked_at, self._moved_at, self._still_s = time.monotonic(), self._moved(), 0.0

    def look(self) -> None:
        """Say a word where it is time, and end a wait that is of no use.

        Raises:
            StoreError: nothing has moved for hang_s.
        """
        now, moved_at = time.monotonic(), self._moved()
        # A node that was suspended as a whole wakes up at no time of its own: long gaps are not the store's.
        passed_s = min(now - self._looked_at, LONGEST_GAP_S)
        self._still_s = self._still_s + passed_s if moved_at == self._moved_at else 0.0
        self._looked_at, self._moved_at = now, moved_at
        if self._still_s >= self._hang_s:
            raise StoreError(
                f"{self._what}: nothing has moved for {self._still_s:.0f} s, so {self._place} does not answer here. "
                f"{_HANGS.cure}; where one call of it may take that long, raise launch.timeout_s",
                _HANGS,
            )
        self._words.look(f"{self._what}, in {self._place}")

    def _moved(self) -> float:
        return max(store.moved_at for store in self._stores)


def bounded(
    place: Location,
    act: Callable[[], T],
    what: str,
    hang_s: float,
    tell: Callable[[str], None] | None = warn,
) -> T:
    """What `act` gives, whose work is on the store of `place`.

    It works in a thread, which is left to itself where it hangs: a call of a file system cannot be ended.

    Args: as of `StoreWait`.

    Raises:
        StoreError: nothing has moved for hang_s. Beside what act raises.
    """
    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(act())
        except BaseException as problem:
            done.set_exception(problem)

    waiting = StoreWait([place], what, hang_s, tell)
    threading.Thread(target=work, name=f"store {place.name}", daemon=True).start()
    while not wait([done], LOOK_S).done:
        waiting.look()
    return done.result()

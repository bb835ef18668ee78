"""Work on a store that may hang, as a file system does that neither answers nor fails: bounded, and in words."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from hpc_train.checkpoint.stores.location import Location
from hpc_train.checkpoint.stores.store import Cause, StoreError
from hpc_train.cluster.agent_wait import LONGEST_GAP_S, Words
from hpc_train.log import warn

T = TypeVar("T")

_LOOK_S = 1.0
"""Between looks (assumed)."""
_HANGS = Cause("the store does not answer", True, "Look at the file system")


def bounded(
    place: Location,
    act: Callable[[], T],
    what: str,
    hang_s: float,
    tell: Callable[[str], None] | None = warn,
) -> T:
    """What `act` gives, whose work is on the store of `place`.

    It works in a thread, which is left to itself where it hangs: a call of a file system cannot be ended.

    Args:
        what: Is waited for, such as "rank 0's use of the folder".
        hang_s: How long nothing may move in the store.
        tell: As of `Words`.

    Raises:
        StoreError: nothing has moved for hang_s. Beside what act raises.
    """
    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(act())
        except BaseException as problem:
            done.set_exception(problem)

    words, still_s = Words(tell), 0.0
    looked_at, moved_at = time.monotonic(), place.store.moved_at
    threading.Thread(target=work, name=f"store {place.name}", daemon=True).start()
    while not wait([done], _LOOK_S).done:
        now, moved = time.monotonic(), place.store.moved_at
        # A node that was suspended as a whole wakes up at no time of its own: long gaps are not the store's.
        still_s = still_s + min(now - looked_at, LONGEST_GAP_S) if moved == moved_at else 0.0
        looked_at, moved_at = now, moved
        if still_s >= hang_s:
            raise StoreError(
                f"{what}: nothing has moved for {still_s:.0f} s, so {place} does not answer here. {_HANGS.cure}; one "
                "call of it may take launch.timeout_s and two minutes",
                _HANGS,
            )
        words.look(f"{what}, in {place}")
    return done.result()

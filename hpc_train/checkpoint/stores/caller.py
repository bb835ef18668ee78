"""Waits for calls of a store that may hang, as a file system does that neither answers nor fails.

A call that hangs cannot be ended. So another thread makes it, and is left to itself. Needs no torch.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, final

from hpc_train.checkpoint.stores.cause import StoreHang
from hpc_train.cluster.agent_wait import LONGEST_GAP_S, LOOK_S, Words
from hpc_train.log import warn

T = TypeVar("T")
_Asked = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


@final
@dataclass(frozen=True)
class Bound:
    """How long nothing may move in a store that is waited for.

    cure: what a person is told to do then, such as which setting to raise. tell: as of `Words`, where nothing moves.
    """

    hang_s: float
    cure: str = "Look at the file system; where one call of it may take that long, raise launch.timeout_s"
    tell: Callable[[str], None] | None = warn


class Moving(Protocol):
    """What gets on, as a `Store` does."""

    @property
    def moved_at(self) -> float: ...


@final
class StoreWait:
    """One wait for another thread's work on stores, to be looked at about every second (`LOOK_S`)."""

    def __init__(self, what: str, refusal: str, silent: str, stores: Collection[Moving], bound: Bound) -> None:
        """what: is waited for. refusal: begins the words of the error, and `silent` names in them what gives nothing.

        stores: where it works; none: nothing of it is seen to move.
        """
        self._what, self._refusal, self._silent = what, refusal, silent
        self._stores, self._bound, self._words = stores, bound, Words(bound.tell)
        self._looked_at, self._moved_at, self._still_s = time.monotonic(), self._moved(), 0.0

    def look(self) -> None:
        """Say a word where it is time, and end a wait that is of no use.

        Raises:
            StoreHang: nothing has moved for as long as is borne.
        """
        now, moved_at, bound = time.monotonic(), self._moved(), self._bound
        # A node that was suspended as a whole wakes up at no time of its own: long gaps are not the store's.
        passed_s = min(now - self._looked_at, LONGEST_GAP_S)
        if moved_at == self._moved_at:
            self._still_s += passed_s
        else:
            self._still_s, self._words = 0.0, Words(bound.tell)
        self._looked_at, self._moved_at = now, moved_at
        if self._still_s >= bound.hang_s:
            raise StoreHang(
                f"{self._refusal}: nothing has moved for {self._still_s:.0f} s, so {self._silent} does not answer "
                f"here. {bound.cure}",
                bound.cure,
            )
        self._words.look(self._what)

    def _moved(self) -> float:
        return max((store.moved_at for store in self._stores), default=0.0)


@final
class Caller:
    """A thread that makes the calls of another one, which waits for each, but not without bound."""

    def __init__(self, name: str) -> None:
        self._asked: _Asked = queue.SimpleQueue()
        self._left: tuple[Future[Any], StoreHang] | None = None
        threading.Thread(target=_make_calls, args=(self._asked,), name=name, daemon=True).start()
        weakref.finalize(self, self._asked.put, None)

    def call(self, act: Callable[[], T], waiting: StoreWait) -> T:
        """What `act` gives.

        Raises:
            StoreHang: it does not get on; or one before did not, and has still not come back. Beside what act raises.
        """
        if self._left is not None and not self._left[0].done():
            hang = self._left[1]
            raise StoreHang(str(hang), hang.cure)
        done: Future[T] = Future()
        self._asked.put((act, done))
        while not _is_over(done):
            try:
                waiting.look()
            except StoreHang as hang:
                self._left = done, hang
                raise
        return done.result()


def _is_over(done: Future[Any]) -> bool:
    """Whether it is within one look."""
    try:
        done.exception(LOOK_S)
    except TimeoutError:
        return done.done()
    return True


def _make_calls(asked: _Asked) -> None:
    while (item := asked.get()) is not None:
        act, done = item
        try:
            done.set_result(act())
        except BaseException as problem:
            done.set_exception(problem)
        del item, act, done  # the next call may be long in coming

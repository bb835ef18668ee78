"""A Kerberos ticket that ends before the job: said at the start and before a save, not by the first one that fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from hpc_train.checkpoint.stores.caller import Bound, Caller, StoreWait
from hpc_train.checkpoint.stores.cause import StoreHang
from hpc_train.checkpoint.stores.location import Location
from hpc_train.cluster.kerberos import ticket_left_s
from hpc_train.comm.world import World
from hpc_train.log import say, warn

_ASKS_FOR_TICKETS = ("hdfs://", "libhdfs://", "webhdfs://", "swebhdfs://")
_SHORT_S = 600
"""Left before a save; assumed: what renews tickets does so earlier, and a large save takes minutes."""
_LOOK_S = 10.0
"""For a look at the ticket's cache, which takes 0.1 ms (measured); assumed: a save need not wait longer for a word."""
_RENEW = (
    "Renew it (`kinit -R` as long as it is renewable, or `kinit` from a keytab), in the cache that the nodes use "
    "(KRB5CCNAME)"
)


def look_at_tickets(
    root: Location, world: World, job_end: float | None, left_s: Callable[[], int | None] = ticket_left_s
) -> None:
    """Where checkpoints go to HDFS and nodes have tickets: warn if the first one ends before the job does.

    Collective over all ranks. job_end: epoch seconds, of rank 0 alone; None: not known.
    """
    if not root.store.prefix.startswith(_ASKS_FOR_TICKETS):
        return
    left = left_s() if world.local_rank == 0 else None
    told = world.control.all_gather(None if left is None else [time.time() + left, world.node])
    ends = sorted(entry for entry in told if entry is not None)
    if world.rank != 0 or not ends:
        return
    ticket_end, node = ends[0]
    what = f"the Kerberos ticket on {node} ends at {_clock(ticket_end)}"
    if job_end is None:
        say(f"{what}; no time limit of this run is known")
    elif ticket_end < job_end:
        warn(
            f"{what}, before this run's time limit at {_clock(job_end)}: if {root.store.prefix} asks for tickets, "
            f"saves may fail from then on. {_RENEW} in time"
        )


@final
class TicketWatch:
    """This node's ticket, looked at by its first rank before each save: what renews it may have ended."""

    def __init__(self, root: Location, world: World, left_s: Callable[[], int | None] = ticket_left_s) -> None:
        self._is_used = root.store.prefix.startswith(_ASKS_FOR_TICKETS) and world.local_rank == 0
        self._world, self._left_s = world, left_s
        self._caller: Caller | None = None
        self._is_known, self._told = False, ""

    def look(self) -> None:
        """Warn where it has run out, soon does, or is gone: once each, until it has been renewed. Not collective."""
        state, words = self._state() if self._is_used else ("", "")
        if state and state != self._told:
            warn(f"the Kerberos ticket on {self._world.node} {words}")
        self._told = state

    def _state(self) -> tuple[str, str]:
        """What is wrong with it, as a name and in words; empty where nothing is, or the site has no tickets."""
        self._caller = self._caller or Caller("Kerberos ticket")
        bound = Bound(_LOOK_S, "Look at its file system, or at the daemon that keeps it", tell=None)
        refusal = "cannot be looked at, so saves may hang too"
        try:
            left = self._caller.call(self._left_s, StoreWait("", refusal, "its cache (KRB5CCNAME)", [], bound))
        except StoreHang as problem:
            return "hangs", str(problem)
        if left is None:
            is_gone = self._is_known and self._told != "out"
            return ("gone", f"is gone: saves may fail. {_RENEW} now") if is_gone else (self._told, "")
        self._is_known = True
        if left >= _SHORT_S:
            return "", ""
        state, ends = ("short", f"ends in {left} s") if left else ("out", "has run out")
        return state, f"{ends}: saves may fail. {_RENEW} now"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))

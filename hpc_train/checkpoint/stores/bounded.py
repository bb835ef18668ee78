"""Work on a store that may hang, as a file system does that neither answers nor fails: bounded, and in words."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from hpc_train.checkpoint.stores.caller import Bound, Caller, StoreWait
from hpc_train.checkpoint.stores.location import Location

T = TypeVar("T")


def wait_in(places: Collection[Location], what: str, bound: Bound) -> StoreWait:
    """One wait for another thread's work in some places, of which the first one is named. what: is waited for."""
    first = next(iter(places))
    return StoreWait(f"{what}, in {first}", what, str(first), [place.store for place in places], bound)


def bounded(place: Location, act: Callable[[], T], what: str, bound: Bound) -> T:
    """What `act` gives, which does all kinds of work in a place, also by none of its store's calls.

    Raises:
        StoreHang: nothing moves. Beside what act raises.
    """
    return Caller(f"store {place.name}").call(act, wait_in([place], what, bound))

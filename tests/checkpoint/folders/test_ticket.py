"""FC-71: a Kerberos ticket that ends before the job is told of at the start, and before the saves that it endangers."""

from __future__ import annotations

import threading
import time

import pytest

from hpc_train.checkpoint.folders import ticket
from hpc_train.checkpoint.stores import caller
from hpc_train.checkpoint.stores.location import locate
from tests.worlds import single_world

HDFS = "hdfs://nn1:8020/user/me"
WEB = "webhdfs://nn1:9870/user/me"


@pytest.mark.parametrize(
    ("place", "left_s", "job_s", "told"),
    [
        (HDFS, 3600, 7200, "before this run's time limit at "),
        (WEB, 3600, 7200, "before this run's time limit at "),
        (HDFS, 7200, 3600, None),
        (HDFS, 3600, None, "no time limit of this run is known"),
        (HDFS, None, 7200, None),
        (WEB, None, 7200, None),
        ("/scratch/me", 3600, 7200, None),
    ],
)
def test_a_ticket_that_ends_before_the_job_is_told_of(
    monkeypatch: pytest.MonkeyPatch, place: str, left_s: int | None, job_s: int | None, told: str | None
) -> None:
    said: list[str] = []
    monkeypatch.setattr(ticket, "say", said.append)
    monkeypatch.setattr(ticket, "warn", said.append)
    job_end = None if job_s is None else time.time() + job_s
    ticket.look_at_tickets(locate(place), single_world(), job_end, lambda: left_s)
    assert len(said) == (told is not None)
    assert told is None or (told in said[0] and "the Kerberos ticket on " in said[0])


def test_a_ticket_that_is_not_renewed_is_told_of_before_a_save_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(ticket, "warn", said.append)
    left: list[int | None] = [None, 86400, 601, 500, 100, 0, 0, None, 86400, None, None, 0]
    watch = ticket.TicketWatch(locate(HDFS), single_world(), lambda: left[0])
    told = []
    while left:
        watch.look()
        told.append(len(said))
        left.pop(0)
    assert told == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4]
    assert "ends in 500 s: saves may fail. Renew it (`kinit -R`" in said[0] and "has run out" in said[1]
    assert "is gone: saves may fail" in said[2]
    ticket.TicketWatch(locate("/scratch/me"), single_world(), lambda: 0).look()
    assert len(said) == 4


def test_a_ticket_whose_cache_hangs_holds_up_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    over = threading.Event()
    monkeypatch.setattr(ticket, "warn", said.append)
    monkeypatch.setattr(ticket, "_LOOK_S", 0.1)
    monkeypatch.setattr(caller, "LOOK_S", 0.01)
    watch = ticket.TicketWatch(locate(HDFS), single_world(), lambda: over.wait(60) and None)
    watch.look()
    watch.look()
    over.set()
    (words,) = said
    assert "cannot be looked at" in words and "so its cache (KRB5CCNAME) does not answer here" in words

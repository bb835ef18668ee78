"""How long a ticket is good, by a KDC of our own; and the warning where a job outlives it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.cluster.kerberos import ticket_left_s
from tests.services import kerberos
from tests.services.kerberos import Kdc


@pytest.fixture(scope="module")
def kdc() -> Iterator[Kdc]:
    if reason := kerberos.skip_reason():
        pytest.skip(reason)
    server = Kdc()
    yield server
    server.stop()


def test_the_ticket_s_time_is_that_of_its_cache(kdc: Kdc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("KRB5_CONFIG", str(kdc.conf))
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{cache}")
    assert ticket_left_s() is None
    keytab = kdc.keytab("somebody")
    kdc.kinit(keytab, "somebody", cache, 3600)
    left_s = ticket_left_s()
    assert left_s is not None and 3500 < left_s <= 3600
    kdc.kinit(keytab, "somebody", cache, 1)
    time.sleep(2.5)  # the KDC's clock counts whole seconds
    assert ticket_left_s() == 0

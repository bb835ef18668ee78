"""An HDFS that asks for Kerberos tickets: none, one that runs out in the middle of a run, and one that is renewed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.checkpoint.stores.cause import StoreError, is_outage
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.checkpoint.stores.store import Patience
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.services import kerberos
from tests.services.hdfs import HdfsCluster
from tests.services.kerberos import Kdc, secure_hdfs

pytestmark = [pytest.mark.hdfs, pytest.mark.timeout(240)]

ELEMENTS = 1 << 18


@pytest.fixture(scope="module")
def kdc() -> Iterator[Kdc]:
    if reason := kerberos.skip_reason():
        pytest.skip(reason)
    server = Kdc()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def secure(kdc: Kdc) -> Iterator[HdfsCluster]:
    cluster = secure_hdfs(kdc)
    cluster.start()
    yield cluster
    cluster.stop()


def test_tickets_that_are_missing_run_out_or_are_renewed(
    kdc: Kdc, secure: HdfsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FC-71: said with the cause; one that has run out is waited for, since a site's daemon may renew it."""
    cache, keytab = tmp_path / "cache", kdc.folder / "hdfs-localhost.keytab"
    monkeypatch.setenv("KRB5_CONFIG", str(kdc.conf))
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{cache}")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(secure.conf_folder))

    def place(patience: Patience) -> Location:
        return locate(f"{secure.url}/checkpoints", patience)  # with a connection of its own

    def get_ticket(lifetime_s: int) -> None:
        kdc.kinit(keytab, "hdfs/localhost", cache, lifetime_s)

    with pytest.raises(StoreError, match="no Kerberos ticket") as error:
        place(Patience()).entry()
    assert not is_outage(error.value)
    get_ticket(3600)
    plain_state.save(Alone(), place(Patience()), 1, ELEMENTS)
    get_ticket(1)
    time.sleep(3.5)  # the KDC's clock counts whole seconds, and it bears a clock that is wrong by one
    with pytest.raises(StoreError, match=r"\(tried for \d+ s\): the Kerberos ticket has run out") as error:
        place(Patience(total_s=2.5)).entries()
    assert is_outage(error.value), "an older checkpoint would be taken"
    renewal = threading.Timer(1.5, get_ticket, [60])
    renewal.start()
    plain_state.save(Alone(), place(Patience()), 2, ELEMENTS)
    assert plain_state.load(Alone(), place(Patience()), ELEMENTS) == 2
    renewal.join()

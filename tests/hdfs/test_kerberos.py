"""An HDFS that asks for Kerberos tickets: none, one that runs out in the middle of a run, and one that is renewed."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hpc_train.checkpoint.stores.cause import StoreError, is_outage
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.checkpoint.stores.spnego import GssError, Negotiation
from hpc_train.checkpoint.stores.store import Patience
from hpc_train.checkpoint.stores.webhdfs_store import WebHdfsBackend, WebHdfsError
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


@pytest.fixture
def cache(kdc: Kdc, secure: HdfsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process looks for its ticket, which is not there yet."""
    monkeypatch.setenv("KRB5_CONFIG", str(kdc.conf))
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{tmp_path}/cache")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(secure.conf_folder))
    return tmp_path / "cache"


def test_tickets_that_are_missing_run_out_or_are_renewed(kdc: Kdc, secure: HdfsCluster, cache: Path) -> None:
    """FC-71: said with the cause; one that has run out is waited for, since a site's daemon may renew it."""

    def places(patience: Patience) -> list[Location]:
        stores = (secure.url, f"webhdfs://{secure.http_address}")
        return [locate(f"{store}/checkpoints", patience) for store in stores]  # with connections of their own

    for place in places(Patience()):
        with pytest.raises(StoreError, match="no Kerberos ticket") as error:
            place.entry()
        assert not is_outage(error.value)
    get_ticket(kdc, cache, 3600)
    for step, place in enumerate(places(Patience()), 1):
        plain_state.save(Alone(), place, step, ELEMENTS)
    get_ticket(kdc, cache, 1)
    time.sleep(3.5)  # the KDC's clock counts whole seconds, and it bears a clock that is wrong by one
    for place in places(Patience(total_s=2.0)):
        with pytest.raises(StoreError, match=r"\(tried for \d+ s\): the Kerberos ticket has run out") as error:
            place.entries()
        assert is_outage(error.value), "an older checkpoint would be taken"
    renewal = threading.Timer(1.5, get_ticket, [kdc, cache, 3600])
    renewal.start()
    for step, place in enumerate(places(Patience()), 3):
        plain_state.save(Alone(), place, step, ELEMENTS)
        assert plain_state.load(Alone(), place, ELEMENTS) == step
    renewal.join()


def test_one_ticket_shown_over_http_is_good_for_a_run(
    kdc: Kdc, secure: HdfsCluster, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cookie outlives the ticket; what no longer accepts it is shown a ticket again."""
    shown: list[str] = []
    claim = Negotiation.claim
    monkeypatch.setattr(Negotiation, "claim", lambda self: shown.append(claim(self)) or shown[-1])
    get_ticket(kdc, cache, 3600)
    backend = WebHdfsBackend("webhdfs", secure.http_address, {"HADOOP_USER_NAME": "somebody_else"})
    with closing(backend.create("/one")) as file:
        file.write(b"of a test")
    cache.unlink()
    assert backend.read("/one", 3, 6) == b"a test" and backend.read("/one", 0, 2) == b"of"
    assert len(shown) == 1
    asked = [backend._redirect("GET", "/one", "OPEN")[1]["Location"] for _ in range(2)]
    assert asked[0] == asked[1], "the name node has made a token for each"
    backend._token = asked[0].partition("delegation=")[2].partition("&")[0][:-4] + "AAAA"
    assert backend.read("/one", 0, 2) == b"of"
    get_ticket(kdc, cache, 3600)
    backend._cookies = {address: value[:-6] + 'AAAA="' for address, value in backend._cookies.items()}
    assert backend.entry("/one") is not None and len(shown) == 2
    with pytest.raises(WebHdfsError, match="Usernames not matched: name=bob"):
        WebHdfsBackend("webhdfs", f"bob@{secure.http_address}", {}).entries("/")


def test_hosts_that_kerberos_does_not_know_or_that_are_others(kdc: Kdc, secure: HdfsCluster, cache: Path) -> None:
    get_ticket(kdc, cache, 3600)
    alias = secure.http_address.replace("localhost", "127.0.0.1")
    with pytest.raises(StoreError, match="does not know the host of the URL by this name"):
        locate(f"webhdfs://{alias}/checkpoints", Patience()).entries()
    with Negotiation("localhost") as negotiation:
        negotiation.claim()
        with pytest.raises(GssError):
            negotiation.check([f"Negotiate {base64.b64encode(b'no proof').decode()}"])


def get_ticket(kdc: Kdc, cache: Path, lifetime_s: int) -> None:
    kdc.kinit(kdc.folder / "hdfs-localhost.keytab", "hdfs/localhost", cache, lifetime_s)

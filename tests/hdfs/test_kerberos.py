"""An HDFS that asks for Kerberos tickets: none, one that runs out in the middle of a run, and one that is renewed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

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
from tests.services.hdfs_pair import HdfsPair
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


def test_tickets_are_told_of_as_ever_while_one_of_two_name_nodes_is_dead(
    kdc: Kdc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as a server that does not answer."""
    cache, pair = tmp_path / "cache", secure_hdfs(kdc, HdfsPair)
    monkeypatch.setenv("KRB5_CONFIG", str(kdc.conf))
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{cache}")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(pair.conf_folder))
    get_ticket(kdc, cache, 3600)
    try:
        pair.start()
        pair.kill_active()
        pair.activate("two")
        stores = (pair.url, f"webhdfs://{pair.http_addresses}")
        for ticket, words in (
            ("good", None),
            ("none", "no Kerberos ticket"),
            ("over", "the Kerberos ticket has run out"),
        ):
            cache.unlink(missing_ok=True)
            if ticket != "none":
                get_ticket(kdc, cache, 3600 if ticket == "good" else 1)
            time.sleep(3.5 if ticket == "over" else 0)
            for number, store in enumerate(stores):
                place = locate(f"{store}/{ticket}-{number}", Patience(total_s=2.0))
                with nullcontext() if words is None else pytest.raises(StoreError, match=words):
                    place.make_folder()
    finally:
        pair.stop()


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
    for proof in ("Negotiate bm8gcHJvb2Y=", "Negotiate bad"):
        with serving(partial(Impostor, proof)) as address:
            backend = WebHdfsBackend("webhdfs", address, {})
            for _ in range(2):  # nor does it come by its cookie into the second one
                with pytest.raises(GssError):
                    backend.entry("/x")


def test_a_gateway_that_takes_the_data_itself_is_sent_its_cookie(kdc: Kdc, secure: HdfsCluster, cache: Path) -> None:
    """As HttpFS does; a 401 would come when the data has gone."""
    get_ticket(kdc, cache, 3600)
    taken: list[bytes] = []
    with serving(partial(Gateway, taken)) as address, closing(WebHdfsBackend("webhdfs", address, {}).create("/x")) as f:
        f.write(b"of a test")
    assert taken == [b"of a test"]


class WebServer(BaseHTTPRequestHandler):
    def answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def log_message(self, format: str, *words: Any) -> None:
        """Not to the output of the tests."""


class Impostor(WebServer):
    """Has no key, and takes every ticket."""

    def __init__(self, proof: str, *words: Any) -> None:
        self._proof = proof
        super().__init__(*words)

    def do_GET(self) -> None:
        is_known = "Authorization" in self.headers or "Cookie" in self.headers
        challenge = self._proof if is_known else "Negotiate"
        self.answer(404 if is_known else 401, WWW_Authenticate=challenge, Set_Cookie='hadoop.auth="u=me"; Path=/')


class Gateway(WebServer):
    """Has no files yet, and takes those whose writer has its cookie."""

    def __init__(self, taken: list[bytes], *words: Any) -> None:
        self._taken = taken
        super().__init__(*words)

    def do_GET(self) -> None:
        if "Authorization" not in self.headers:
            return self.answer(401, WWW_Authenticate="Negotiate", Set_Cookie="hadoop.auth=; Path=/")
        self.answer(404, Set_Cookie='hadoop.auth="u=me&s=a="; Path=/; HttpOnly')
        self.wfile.write(b'{"RemoteException": {"exception": "FileNotFoundException", "message": "none"}}')

    def do_PUT(self) -> None:
        if self.headers.get("Cookie") != 'hadoop.auth="u=me&s=a="':
            return self.answer(401, WWW_Authenticate="Negotiate")
        if "data=true" not in self.path:
            return self.answer(307, Location=f"http://{self.headers['Host']}{self.path}&data=true")
        size = int(self.rfile.readline(), 16)
        self._taken.append(self.rfile.read(size))
        self.rfile.read(len(b"\r\n0\r\n\r\n"))
        self.answer(201)


@contextmanager
def serving(kind: Callable[..., WebServer]) -> Iterator[str]:
    """Its address, where Kerberos knows a web server."""
    with ThreadingHTTPServer(("localhost", 0), kind) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"localhost:{server.server_port}"
        finally:
            server.shutdown()


def get_ticket(kdc: Kdc, cache: Path, lifetime_s: int) -> None:
    kdc.kinit(kdc.folder / "hdfs-localhost.keytab", "hdfs/localhost", cache, lifetime_s)

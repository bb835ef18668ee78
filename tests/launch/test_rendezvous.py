from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpc_train.errors import LaunchError
from hpc_train.launch.exec import missing_ranks_watch
from hpc_train.launch.rendezvous import Endpoint, RendezvousClient, RendezvousServer

WHERE = Endpoint("10.0.0.7", 4711)


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer(4)
    yield server
    server.close()


def client(server: RendezvousServer, rank: int, *, limit_s: float = 30.0, token: str = "") -> RendezvousClient:
    return RendezvousClient("127.0.0.1", server.port, token or server.token, rank, time.monotonic() + limit_s)


def test_those_who_ask_first_are_told_as_soon_as_rank_0_has_spoken(server: RendezvousServer) -> None:
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(client(server, rank).ask) for rank in (1, 2, 3)]
        time.sleep(0.1)
        client(server, 0).publish(WHERE)
        assert [answer.result() for answer in asked] == [WHERE] * 3
    assert server.not_heard_from() == []


def test_500_at_once_are_all_told_although_the_queue_is_short() -> None:
    """FC-59"""
    server = RendezvousServer(501, backlog=8)
    try:
        with ThreadPoolExecutor(500) as pool:
            asked = [pool.submit(client(server, rank, limit_s=60).ask) for rank in range(1, 501)]
            client(server, 0, limit_s=60).publish(WHERE)
            assert {answer.result() for answer in asked} == {WHERE}
        assert server.not_heard_from() == []
    finally:
        server.close()


def test_ranks_that_never_came_are_named_with_their_hosts(server: RendezvousServer) -> None:
    """FC-59"""
    now = 0.0
    hosts = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    watch = missing_ranks_watch(server, hosts, 60.0, lambda: now)
    client(server, 0).publish(WHERE)
    client(server, 1).ask()
    client(server, 2).ask()
    assert watch() is None
    now = 61.0
    reason = watch()
    assert reason is not None
    assert "1 of 4 ranks were not heard from in 60 s: 3 on n2." in reason


def test_once_all_have_met_no_deadline_stops_them(server: RendezvousServer) -> None:
    now = 0.0
    watch = missing_ranks_watch(server, {rank: "n1" for rank in range(4)}, 60.0, lambda: now)
    client(server, 0).publish(WHERE)
    for rank in (1, 2, 3):
        client(server, rank).ask()
    assert watch() is None
    now = 1e6
    assert watch() is None


def test_a_rank_that_waits_in_vain_says_for_what(server: RendezvousServer) -> None:
    with pytest.raises(LaunchError, match="rank 2 gave up: rank 0 has not said where it listens"):
        client(server, 2, limit_s=6.0).ask()


def test_a_driver_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    lost = RendezvousClient("127.0.0.1", port, "token", 1, time.monotonic() + 0.3)
    with pytest.raises(LaunchError, match=rf"rank 1 gave up: the driver at 127\.0\.0\.1:{port} does not answer"):
        lost.ask()


def test_another_run_s_tasks_are_turned_away(server: RendezvousServer) -> None:
    with pytest.raises(LaunchError, match="another run's rendezvous"):
        client(server, 1, token="wrong").ask()
    with pytest.raises(LaunchError, match="another run's rendezvous"):
        client(server, 9).ask()
    assert server.not_heard_from() == [0, 1, 2, 3]


def test_noise_on_the_port_is_answered_and_harms_nobody(server: RendezvousServer) -> None:
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"token": 1}\n', b"x" * 200_000):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            try:
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.makefile("rb").readline()
            except OSError:
                continue
            assert not answer or "error" in json.loads(answer)
    client(server, 0).publish(WHERE)
    assert client(server, 1).ask() == WHERE


def test_whoever_holds_the_store_waits_for_all_to_finish(server: RendezvousServer) -> None:
    ended = threading.Event()

    def hold() -> None:
        client(server, 0).finish(wait_for_all=True)
        ended.set()

    holder = threading.Thread(target=hold)
    holder.start()
    for rank in (1, 2):
        client(server, rank).finish(wait_for_all=False)
    assert not ended.wait(0.3)
    client(server, 3).finish(wait_for_all=False)
    assert ended.wait(60.0)
    holder.join()


def test_when_the_driver_is_gone_nobody_waits(server: RendezvousServer) -> None:
    waiting = client(server, 0)
    server.close()
    waiting.finish(wait_for_all=True)

"""The agent's server: many clients, clients that die or do not listen, other users, descriptors both ways."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cluster.agent_address import AgentConnection, AgentGone, agent_socket_name
from hpc_train.cluster.agent_service import Peer, Service
from hpc_train.cluster.memory_segment import Segment
from hpc_train.errors import DataError
from tests.agents import NODE, served


class Shop(Service):
    """Sells segments, takes them back, answers late, or not at all."""

    name = "shop"
    takes_descriptors = True

    def __init__(self) -> None:
        self.left: list[int] = []
        self.closed = False

    def answer(self, peer: Peer, message: Mapping[str, Any], descriptors: Sequence[int]) -> Mapping[str, Any] | None:
        verb = message["say"].partition(".")[2]
        if verb == "segment":
            text = message["text"].encode()
            segment = Segment.create("test.shop", 4096)
            segment.write(0, text)
            segment.seal()
            peer.send({"text": message["text"]}, [segment.descriptor])
            segment.close()
        elif verb == "give":
            segments = [Segment.received(descriptor) for descriptor in descriptors]
            texts = []
            for segment in segments:
                with segment.map() as memory:
                    texts.append(memory[:8].rstrip(b"\0").decode())
                segment.close()
            return {"texts": texts}
        elif verb == "late":
            threading.Timer(0.05, peer.send, [{"late": message["number"]}]).start()
        elif verb == "large":
            return {"filling": "x" * message["size"]}
        elif verb == "fail":
            raise DataError("the goods are damaged")
        return None

    def gone(self, peer: Peer) -> None:
        self.left.append(peer.pid)

    def close(self) -> None:
        self.closed = True


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _read(descriptors: Sequence[int]) -> bytes:
    (descriptor,) = descriptors
    segment = Segment.received(descriptor)
    with segment.map() as memory:
        segment.close()
        return bytes(memory[:8]).rstrip(b"\0")


def test_many_clients_at_once_each_get_their_own_segment() -> None:
    before = _open_descriptors()
    with served([Shop()]) as agent:

        def buy(number: int) -> None:
            connection = agent.connect()
            for turn in range(5):
                text = f"{number}.{turn}"
                answer, descriptors = connection.ask({"say": "shop.segment", "text": text})
                assert answer["text"] == text and _read(descriptors) == text.encode()
                answer, descriptors = connection.ask({"say": "shop.late", "number": number})
                assert (answer["late"], descriptors) == (number, [])
            connection.close()

        with ThreadPoolExecutor(48) as pool:
            list(pool.map(buy, range(48)))
    assert _open_descriptors() == before


def test_clients_give_segments_to_the_agent() -> None:
    with served([Shop()]) as agent:
        connection, segments = agent.connect(), [Segment.create("test.mine", 4096) for _ in range(3)]
        for number, segment in enumerate(segments):
            segment.write(0, f"mine{number}".encode())
        answer, _ = connection.ask({"say": "shop.give"}, [segment.descriptor for segment in segments])
        assert answer == {"texts": ["mine0", "mine1", "mine2"]}
        connection.close()
        for segment in segments:
            segment.close()


def test_errors_are_answers_and_the_conversation_goes_on() -> None:
    before = _open_descriptors()
    with served([Shop()]) as agent:
        connection = agent.connect()
        assert connection.ask({"say": "shop.fail"})[0] == {"error": "the goods are damaged", "kind": "DataError"}
        assert connection.ask({"say": "shop.segment"})[0] == {"error": "the message has no 'text'", "kind": "KeyError"}
        spare = os.memfd_create("test.spare")
        answer, _ = connection.ask({"say": "bakery.bread"}, [spare])
        assert "unknown message 'bakery.bread'; known are shop" in answer["error"]
        os.close(spare)
        assert connection.ask({"say": "shop.large", "size": 3})[0] == {"filling": "xxx"}
        connection.close()
    assert _open_descriptors() == before


def test_a_client_that_dies_in_the_middle_of_a_request_harms_nobody() -> None:
    """Killed with a request half sent, with an answer under way, and while an answer is awaited."""
    shop = Shop()
    before = _open_descriptors()
    with served([shop]) as agent:
        code = f"""
import os, signal, socket, sys
from hpc_train.cluster.agent_address import agent_socket_name
from hpc_train.cluster.agent_wire import send_message
def begin(data):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(agent_socket_name({agent.key!r}, {NODE!r}, os.getuid()))
    connection.sendall(data)
    return connection
held = [begin(b'{{"say": "shop.seg'), begin(b'{{"say": "shop.large", "size": 9000000}}\\n'),
        begin(b'{{"say": "shop.late", "number": 1}}\\n'), begin(b'{{"say": "shop.never"}}\\n')]
print(held[1].recv(1), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
        assert done.returncode == -9 and done.stdout == b"b'{'\n"
        connection = agent.connect()
        assert connection.ask({"say": "shop.late", "number": 2})[0] == {"late": 2}
        deadline = time.monotonic() + 10
        while len(shop.left) < 4:
            assert time.monotonic() < deadline, shop.left
            time.sleep(0.01)
        connection.close()
    assert _open_descriptors() == before
    assert shop.closed


def test_a_client_that_does_not_listen_holds_nobody_up_and_is_left_alone_in_the_end() -> None:
    with served([Shop()]) as agent:
        deaf = socket.socket(socket.AF_UNIX)
        deaf.connect(agent_socket_name(agent.key, NODE, os.getuid()))
        deaf.settimeout(10)
        other = agent.connect()
        request = b'{"say": "shop.large", "size": 2000}\n'
        with pytest.raises(OSError):  # the server has closed its end
            for _ in range(20):
                deaf.sendall(request * 100)
                assert other.ask({"say": "shop.large", "size": 1})[0] == {"filling": "x"}
        assert any("takes no answers" in line for line in agent.log)
        deaf.close()
        other.close()


def test_a_waiting_client_learns_at_once_that_the_agent_has_ended() -> None:
    with ThreadPoolExecutor(1) as pool:
        with served([Shop()]) as agent:
            connection = agent.connect()
            waiting = pool.submit(connection.ask, {"say": "shop.never"}, timeout_s=60.0)
            time.sleep(0.1)
        with pytest.raises(AgentGone, match="has ended"):
            waiting.result(timeout=10)
        with pytest.raises(AgentGone):
            connection.ask({"say": "shop.never"})
        connection.close()
    with pytest.raises(AgentGone, match="no node agent answers on n1"):
        agent.connect()


def test_a_client_that_is_closed_by_another_thread_stops_waiting() -> None:
    with served([Shop()]) as agent, ThreadPoolExecutor(1) as pool:
        connection = agent.connect()
        waiting = pool.submit(connection.ask, {"say": "shop.never"}, timeout_s=60.0)
        time.sleep(0.1)
        connection.close()
        with pytest.raises(AgentGone):
            waiting.result(timeout=10)


def test_an_agent_that_does_not_answer_in_time_is_an_error_of_its_own() -> None:
    with served([Shop()]) as agent:
        connection = agent.connect()
        with pytest.raises(AgentGone, match=r"did not answer 'shop\.never' in time"):
            connection.ask({"say": "shop.never"}, timeout_s=0.1)
        connection.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can listen as another user")
def test_somebody_else_at_the_agents_address_is_not_spoken_to() -> None:
    address = agent_socket_name("taken", NODE, os.getuid())
    code = f"""
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind({address!r})
os.setuid(65534)
listener.listen()
print("ready", flush=True)
sys.stdin.read()
"""
    squatter = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path("/"), text=True
    )
    assert squatter.stdout is not None
    assert squatter.stdout.readline() == "ready\n"
    with pytest.raises(AgentGone, match="of user 65534, which is not ours"):
        AgentConnection.open("taken", NODE)
    squatter.communicate()


def test_agents_of_several_nodes_on_one_machine_have_addresses_of_their_own() -> None:
    """Many slurmd on one host share a network namespace, and so the abstract addresses."""
    names = {agent_socket_name("7.0.100.ab", node, 1000) for node in ("n1", "n2")}
    assert len(names) == 2 and all(name.startswith("\0hpc_train.1000.7.0.100.ab.") for name in names)

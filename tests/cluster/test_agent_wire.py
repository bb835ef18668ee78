"""Messages with descriptors over a stream: however the bytes are cut, each message gets its own."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.cluster.agent_wire import Inbox, WireError, encode, parse_line, send_message, send_some


def _file_saying(text: str) -> int:
    descriptor = os.memfd_create("test.wire")
    os.write(descriptor, text.encode())
    return descriptor


def _text_of(descriptor: int) -> str:
    text = os.pread(descriptor, 100, 0).decode()
    os.close(descriptor)
    return text


@settings(max_examples=50)
@given(counts=st.lists(st.integers(0, 3), min_size=1, max_size=12), sizes=st.lists(st.integers(0, 70_000), min_size=12))
def test_each_message_has_the_descriptors_that_were_sent_with_it(counts: list[int], sizes: list[int]) -> None:
    ours, theirs = socket.socketpair()
    before = len(os.listdir("/proc/self/fd"))

    def send() -> None:
        for number, count in enumerate(counts):
            descriptors = [_file_saying(f"{number}.{index}") for index in range(count)]
            send_message(ours, {"number": number, "filling": "x" * sizes[number]}, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        ours.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    inbox, found = Inbox(theirs), []
    while inbox.receive():
        while (line := inbox.next_line()) is not None:
            message = parse_line(line)
            assert len(message["filling"]) == sizes[message["number"]]
            found.append([_text_of(descriptor) for descriptor in inbox.take_descriptors(message)])
    sender.join()
    assert found == [[f"{number}.{index}" for index in range(count)] for number, count in enumerate(counts)]
    assert len(os.listdir("/proc/self/fd")) == before
    ours.close()
    theirs.close()


def test_an_end_that_closes_with_the_last_byte_has_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is told to stop is gone before the sender's next call, which must not be made then."""
    ours, theirs = socket.socketpair()

    def send_and_lose_the_other_end(connection: socket.socket, line: memoryview, descriptors: Sequence[int]) -> int:
        sent = send_some(connection, line, descriptors)
        theirs.close()
        return sent

    monkeypatch.setattr("hpc_train.cluster.agent_wire.send_some", send_and_lose_the_other_end)
    with ours:
        send_message(ours, {"say": "stop"})


def test_descriptors_that_were_promised_and_did_not_come_are_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for promised in (1, -1, "1", None):
            ours.sendall(encode({"descriptors": promised}))
            inbox = Inbox(theirs)
            assert inbox.receive()
            line = inbox.next_line()
            assert line is not None
            with pytest.raises(WireError, match="descriptors"):
                inbox.take_descriptors(parse_line(line))


def test_descriptors_that_nobody_takes_are_closed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        descriptor = _file_saying("unasked")
        send_some(ours, memoryview(b"no message"), [descriptor])
        inbox = Inbox(theirs)
        inbox.receive()
        assert len(os.listdir("/proc/self/fd")) == before + 2
        inbox.close()
        os.close(descriptor)
        assert len(os.listdir("/proc/self/fd")) == before


def test_received_descriptors_do_not_go_to_programs_that_are_started() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        descriptor = _file_saying("private")
        send_message(ours, {}, [descriptor])
        inbox = Inbox(theirs)
        inbox.receive()
        line = inbox.next_line()
        assert line is not None
        (received,) = inbox.take_descriptors(parse_line(line))
        assert not os.get_inheritable(received)
        os.close(received)
        os.close(descriptor)


@pytest.mark.parametrize("line", [b"", b"1", b"[]", b"{", b"\xff"])
def test_what_is_no_json_object_is_no_message(line: bytes) -> None:
    with pytest.raises(WireError, match="a message is"):
        parse_line(line)

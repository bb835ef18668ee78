from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from hpc_train.cluster.debug_channel import (
    LINE,
    OUTPUT,
    Channel,
    DebugRequest,
    answer,
    call,
    new_key,
    read_debug_request,
)


def connect(theirs: Callable[[str, int], object], key: str) -> tuple[Channel | None, object]:
    """What the listening side gets, and what the calling side does."""
    results: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        caller = threading.Thread(target=lambda: results.append(theirs("127.0.0.1", port)))
        caller.start()
        channel = answer(listener.accept()[0], key)
        caller.join(timeout=60)
    return channel, results[0] if results else None


def test_two_that_hold_the_key_exchange_messages_until_one_closes() -> None:
    key = new_key()
    driver, rank = connect(lambda address, port: call(address, port, key, timeout_s=60), key)
    assert driver is not None
    assert isinstance(rank, Channel)
    driver.send(LINE, "p größe\n".encode())
    assert rank.receive() == (LINE, "p größe\n".encode())
    text = b"x" * 1_500_000
    sender = threading.Thread(target=rank.send, args=(OUTPUT, text))
    sender.start()
    first, second = driver.receive(), driver.receive()
    sender.join()
    assert first is not None
    assert second is not None
    assert first[1] + second[1] == text
    rank.close()
    assert driver.receive() is None
    driver.close()


def test_a_caller_without_the_key_is_refused_and_learns_nothing() -> None:
    def wrong(address: str, port: int) -> object:
        with pytest.raises(OSError):
            call(address, port, new_key(), timeout_s=60)
        return "refused"

    assert connect(wrong, new_key()) == (None, "refused")


def test_noise_is_refused() -> None:
    def noise(address: str, port: int) -> object:
        with socket.create_connection((address, port)) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            return len(connection.recv(4096))

    assert connect(noise, new_key()) == (None, 32)


def test_a_listener_without_the_key_is_refused_by_the_caller() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connection = listener.accept()[0]
            with connection:
                connection.sendall(b"n" * 32)
                connection.recv(64)
                connection.sendall(b"p" * 32)

        pretender = threading.Thread(target=pretend)
        pretender.start()
        with pytest.raises(ConnectionRefusedError, match="does not hold this run's key"):
            call("127.0.0.1", listener.getsockname()[1], new_key(), timeout_s=60)
        pretender.join()


def test_the_request_goes_through_the_environment_whole() -> None:
    request = DebugRequest(3, "10.0.0.1", 5000, new_key())
    assert read_debug_request({"HPC_TRAIN_DEBUG": request.to_text()}) == request
    assert read_debug_request({}) is None

"""How two agents of one run speak of a part over TCP: lines of JSON, raw bytes, proofs, and limits. Needs no torch.

1. owner: a random word
2. keeper: a word of its own, and a proof over the owner's that it knows the run's secret
3. owner: a proof over the keeper's word, and over length and digest of the part's record; then the record itself
4. keeper: go on, or why not
5. owner: the files of the part, one behind the other
6. keeper: that all of it is durable, or why not

Up to the owner's proof the keeper reads no more than a few KiB, and gives it all together a few seconds. Nothing is
unpickled, and nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, final

from hpc_train.errors import CheckpointError

T = TypeVar("T")

BLOCK_BYTES = 4 << 20
"""Sent and received at once; assumed: large enough that calls cost nothing."""
GREETING_S = 10.0
"""For the greeting as a whole; assumed: agents answer in milliseconds."""
MOST_GREETING_BYTES = 1024
"""Of a line before the other end has proved itself; derived: three words of 64 digits and their names."""
MOST_ANSWER_BYTES = 1 << 16
SILENCE_S = 120.0
"""Without a byte; assumed: longer than a disk that is busy with another job takes to make a file durable."""
_TICK_S = 0.5
"""After which one who waits looks whether he still has to; assumed: short beside any copy."""
_LINGER_S = 10.0
"""For an owner that is told no to end; assumed: more than it takes to look for an answer before its next block."""


class CopyFailed(CheckpointError):
    """A copy did not reach the node that shall keep it."""


@final
class Conversation:
    """One end of a connection. What waits looks every half second whether it still has to.

    check: raises where it has not.
    """

    def __init__(self, connection: socket.socket, check: Callable[[], None]) -> None:
        """The greeting begins, and has GREETING_S until `greeted`."""
        self._connection, self.check = connection, check
        self._poll = select.poll()  # not select.select, which takes no descriptors from 1024 on
        self._poll.register(connection, select.POLLIN)
        self._buffer = bytearray()
        self._deadline: float | None = time.monotonic() + GREETING_S
        connection.settimeout(_TICK_S)

    def greeted(self) -> None:
        """Both ends know each other: from now on they may take their time, if they are not silent."""
        self._deadline = None

    def send_line(self, message: dict[str, Any]) -> None:
        self.send(memoryview(json.dumps(message).encode() + b"\n"))

    def send(self, data: memoryview) -> None:
        while data:
            data = data[self._patiently(self._connection.send, data) :]

    def read_line(self, most_bytes: int) -> dict[str, Any]:
        """A JSON object.

        Raises:
            CopyFailed: the other end went away, or falls silent.
            ValueError: it is none, or longer.
        """
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) >= most_bytes:
                raise ValueError("a line is too long")
            data = self._patiently(self._connection.recv, most_bytes - len(self._buffer))
            if not data:
                raise CopyFailed("the other end went away")
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("a line is no JSON object")
        return message

    def receive(self, block: memoryview) -> int:
        """Take bytes into a block; how many, at least one."""
        if self._buffer:
            count = min(len(block), len(self._buffer))
            block[:count] = self._buffer[:count]
            del self._buffer[:count]
            return count
        count = self._patiently(self._connection.recv_into, block)
        if not count:
            raise CopyFailed("the other end went away")
        return count

    def has_answer(self) -> bool:
        """Whether the other end has said something, or has gone."""
        return bool(self._buffer) or bool(self._poll.poll(0))

    def say_no(self, why: str) -> None:
        """Tell the other end, and let it come to hear it: closed at once, the connection would take the word along."""
        with suppress(OSError, CheckpointError):
            self.send_line({"error": why})
            self._connection.shutdown(socket.SHUT_WR)
            is_stranger, deadline = self._deadline is not None, time.monotonic() + _LINGER_S
            while not is_stranger and time.monotonic() < deadline:
                with suppress(TimeoutError):
                    if not self._connection.recv(1 << 20):
                        return

    def _patiently(self, act: Callable[[Any], T], what: memoryview | int) -> T:
        """What moves bytes, tried until it moves some."""
        quiet_until = time.monotonic() + SILENCE_S
        while True:
            self.check()
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise CopyFailed(f"the greeting was not over after {GREETING_S:g} s")
            try:
                return act(what)
            except TimeoutError:
                if time.monotonic() > quiet_until:
                    raise CopyFailed(f"the other end has been silent for {SILENCE_S:g} s") from None


def proof(secret: str, *words: str) -> str:
    """What only who knows the secret can say of these words."""
    return hmac.new(secret.encode(), json.dumps(words).encode(), hashlib.sha256).hexdigest()


def is_proof(told: Any, secret: str, *words: str) -> bool:
    return isinstance(told, str) and hmac.compare_digest(told.encode(), proof(secret, *words).encode())

"""How the node agent and its clients speak: a line of JSON for each message, with descriptors where it has some.

A message that comes with n descriptors says so by `"descriptors": n`; they travel beside its first byte.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, final

MAX_MESSAGE_BYTES = 64 << 20
"""Assumed: pieces of a step of millions of tokens take some MB; what is longer is no message of ours."""
MAX_DESCRIPTORS = 64
"""With one message. cited: unix(7), SCM_MAX_FD is 253."""
_RECEIVE_BYTES = 1 << 16
_COUNT = "descriptors"


class WireError(Exception):
    """What came is no message."""


def encode(message: Mapping[str, Any], num_descriptors: int = 0) -> bytes:
    """The line of a message."""
    assert num_descriptors <= MAX_DESCRIPTORS, "too many descriptors for one message"
    told = {**message, _COUNT: num_descriptors} if num_descriptors else message
    return json.dumps(told, separators=(",", ":")).encode() + b"\n"


def parse_line(line: bytes) -> dict[str, Any]:
    """The message of a line.

    Raises:
        WireError: it is no JSON object.
    """
    try:
        message = json.loads(line)
    except ValueError as problem:
        raise WireError(f"a message is a line of JSON: {problem}") from problem
    if not isinstance(message, dict):
        raise WireError("a message is a JSON object")
    return message


def send_some(connection: socket.socket, line: memoryview, descriptors: Sequence[int]) -> int:
    """Send as much of a line as goes now, with its descriptors beside the first byte; returns how many bytes went."""
    if not descriptors:
        return connection.send(line)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    return connection.sendmsg([line], [rights])


def send_message(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a whole message on a blocking socket; the descriptors stay this process's own as well."""
    view = memoryview(encode(message, len(descriptors)))
    sent = send_some(connection, view, descriptors)
    # The other end may have answered and closed by now: sending nothing more would be an error then.
    if sent < len(view):
        connection.sendall(view[sent:])


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


@final
class Inbox:
    """Puts what comes over a connection together to messages, each with the descriptors that came with it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._bytes = bytearray()
        self._descriptors: deque[int] = deque()
        self._searched = 0

    def receive(self) -> bool:
        """Take what is there, waiting on a blocking socket; false when the other end is closed.

        Raises:
            OSError: BlockingIOError where nothing is there on a socket that does not block, TimeoutError after its
                time.
            WireError: descriptors that this process cannot take.
        """
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, flags, _ = self._connection.recvmsg(_RECEIVE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, rights in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(rights[: len(rights) - len(rights) % numbers.itemsize])
                self._descriptors.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            raise WireError("descriptors were lost on their way: this process has too many open files (ulimit -n)")
        self._bytes += data
        return bool(data)

    def next_line(self) -> bytes | None:
        """The next whole line, without its end; None where there is none yet.

        Raises:
            WireError: it is too long.
        """
        end = self._bytes.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._bytes)
            if self._searched > MAX_MESSAGE_BYTES:
                raise WireError(f"a message of more than {MAX_MESSAGE_BYTES >> 20} MiB")
            return None
        line = bytes(self._bytes[:end])
        del self._bytes[: end + 1]
        self._searched = 0
        return line

    def take_descriptors(self, message: Mapping[str, Any]) -> list[int]:
        """Those that came with a message.

        Raises:
            WireError: it tells of more than there are.
        """
        count = message.get(_COUNT, 0)
        if not isinstance(count, int) or not 0 <= count <= len(self._descriptors):
            raise WireError(f"a message tells of {count!r} descriptors, and {len(self._descriptors)} came")
        return [self._descriptors.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close descriptors that nobody took."""
        while self._descriptors:
            os.close(self._descriptors.popleft())

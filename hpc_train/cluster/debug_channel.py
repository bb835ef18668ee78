"""The connection between a driver's terminal and the debugger on a rank: who may speak, and messages both ways.

The key is drawn by the driver and goes to the ranks in their environment. Each end proves that it holds the key
before anything else is read from it. A message is a kind and bytes.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

DEBUG_VARIABLE = "HPC_TRAIN_DEBUG"
"""Set by the driver of `run --debug-rank` for all ranks. It holds the key: it is not to be recorded."""

# From the driver: a line that was typed, the end of the input, Ctrl-C.
LINE, END_OF_INPUT, INTERRUPT = b"L", b"E", b"I"
# From the rank: text for the terminal, it waits for a line (with the prompt), it goes on.
OUTPUT, WAITS, GOES_ON = b"O", b"W", b"G"

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HEADER = struct.Struct("!cI")
_MOST_BYTES = 1 << 20
_GREETING_S = 10.0


@dataclass(frozen=True)
class DebugRequest:
    """Which rank is debugged, and where its terminal listens. key: in hexadecimal."""

    rank: int
    address: str
    port: int
    key: str

    def to_text(self) -> str:
        return json.dumps(asdict(self))


def read_debug_request(env: Mapping[str, str]) -> DebugRequest | None:
    text = env.get(DEBUG_VARIABLE)
    return DebugRequest(**json.loads(text)) if text else None


class Channel:
    """An open connection. Several threads may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Raises OSError where the other end is gone."""
        with self._sending:
            for start in range(0, max(len(data), 1), _MOST_BYTES):
                piece = data[start : start + _MOST_BYTES]
                self._connection.sendall(_HEADER.pack(kind, len(piece)) + piece)

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next message; None where the connection has ended, for whatever reason."""
        try:
            kind, size = _HEADER.unpack(_read(self._connection, _HEADER.size))
            return None if size > _MOST_BYTES else (kind, _read(self._connection, size))
        except OSError:
            return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def new_key() -> str:
    return secrets.token_hex(32)


def answer(connection: socket.socket, key: str) -> Channel | None:
    """On the listening side: a channel, or None (and a closed connection) for whoever does not hold the key."""
    try:
        connection.settimeout(_GREETING_S)
        ours = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(ours)
        greeting = _read(connection, _NONCE_BYTES + _PROOF_BYTES)
        theirs, proof = greeting[:_NONCE_BYTES], greeting[_NONCE_BYTES:]
        if hmac.compare_digest(proof, _proof(key, b"rank", ours, theirs)):
            connection.sendall(_proof(key, b"driver", theirs, ours))
            return _opened(connection)
    except OSError:
        pass
    connection.close()
    return None


def call(address: str, port: int, key: str, *, timeout_s: float) -> Channel:
    """On the calling side.

    Raises:
        OSError: nobody listens, or it does not hold the key.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=_GREETING_S)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    try:
        theirs = _read(connection, _NONCE_BYTES)
        ours = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(ours + _proof(key, b"rank", theirs, ours))
        if not hmac.compare_digest(_read(connection, _PROOF_BYTES), _proof(key, b"driver", ours, theirs)):
            raise ConnectionRefusedError(f"{address}, port {port}, does not hold this run's key")
    except OSError:
        connection.close()
        raise
    return _opened(connection)


def _opened(connection: socket.socket) -> Channel:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that vanishes is noticed after some two minutes of silence, cited: tcp(7).
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return Channel(connection)


def _proof(key: str, side: bytes, challenge: bytes, nonce: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(key), side + challenge + nonce, "sha256")


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the other end has closed the connection")
        data += piece
    return data

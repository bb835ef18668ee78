"""A node's part on its way to the node that keeps the copy: TCP between two agents of one run. Needs no torch.

1. both ends prove that they know the run's secret, which ranks were told over their own channel
2. the owner sends the part's record and, when it is told to go on, the files one behind the other
3. the keeper compares each box with its checksum as it comes, and answers when the part is complete on its disk

Lines are JSON; nothing is unpickled. Both ends hold one block in memory. An end that falls silent is left.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from hpc_train.checkpoint.archive import archive_of
from hpc_train.checkpoint.local_parts import PartRecord, complete, new_part
from hpc_train.checkpoint.location import Location
from hpc_train.checkpoint.node_save import Part
from hpc_train.checkpoint.placed import WrittenBox
from hpc_train.checkpoint.store import Writer
from hpc_train.checkpoint.write import Flow
from hpc_train.errors import CheckpointError

Log = Callable[[str], None]

_BLOCK_BYTES = 4 << 20
"""Sent and received at once; assumed: large enough that calls cost nothing."""
_GREETING_S = 10.0
"""For a greeting; assumed: agents answer one at a time, and who cannot greet must not hold others up."""
_LINGER_S = 10.0
"""For an owner that is told no to end; assumed: more than it takes to send what it has begun."""
_PAUSE_S = 0.1
"""Before the next try to take a connection that could not be taken, for want of descriptors as a rule (assumed)."""
_SILENCE_S = 120.0
"""Without a byte; assumed: longer than a disk that is busy with another job takes for a block."""
_MOST_LINE_BYTES = 256 << 20
"""Of a record; derived: 300 bytes a box, and a node's ranks have some 10,000 boxes."""


@dataclass(frozen=True)
class Keeper:
    """Where the agent listens that keeps a node's copies."""

    address: str
    port: int
    secret: str


class CopyFailed(CheckpointError):
    """A copy did not reach the node that shall keep it."""


def send_part(keeper: Keeper, record: PartRecord, parts: Sequence[Part], flow: Flow) -> None:
    """Have a part kept by another node; it is durable there when this returns. parts: what the record is of.

    Raises:
        CopyFailed: it is not.
    """
    where = f"{keeper.address}:{keeper.port}"
    try:
        connection = socket.create_connection((keeper.address, keeper.port), timeout=_GREETING_S)
        with connection, connection.makefile("rb") as lines:
            _send_line(connection, {"owner_asks": (asked := secrets.token_hex(16))})
            greeting = _read_line(lines, 1024)
            if not _is_proof(greeting.get("proof"), keeper.secret, "keeper", asked):
                raise CopyFailed(f"who listens at {where} is no agent of this run")
            text = record.to_json()
            proof = _proof(keeper.secret, "owner", str(greeting.get("keeper_asks")), text)
            _send_line(connection, {"record": text, "proof": proof})
            connection.settimeout(_SILENCE_S)
            answer = _read_line(lines, 1 << 16)
            if "error" in answer:
                raise CopyFailed(f"the copy is not kept at {where}: {answer['error']}")
            for block in _blocks(record, parts):
                flow.pass_through(len(block))
                connection.sendall(block)
            answer = _read_line(lines, 1 << 16)
    except (OSError, ValueError) as problem:
        raise CopyFailed(f"the copy did not reach {where}: {type(problem).__name__}: {problem}") from problem
    if "error" in answer:
        raise CopyFailed(f"the copy is not kept at {where}: {answer['error']}")


@final
class CopyServer:
    """Takes the parts of one other node, one at a time, in a thread."""

    def __init__(self, address: str, secret: str, root: Location, node: int, num_nodes: int, most_bytes: int, log: Log):
        """Listen, at a port of the kernel's choice.

        address: of this node, under which others reach it. node, num_nodes: whose parts, of how many nodes.
        most_bytes: of a part.

        Raises:
            OSError: the address is none of this node.
        """
        self._secret, self._root, self._node, self._num_nodes = secret, root, node, num_nodes
        self._most_bytes, self._log = most_bytes, log
        self._listener = socket.create_server((address, 0), backlog=8)
        self.port: int = self._listener.getsockname()[1]
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="copies", daemon=True)
        self._thread.start()

    def close(self, limit_s: float) -> None:
        """Take nothing more, after what is on its way now."""
        self._is_closing = True
        # Not close: that would leave the thread waiting in accept.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(limit_s)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError as problem:
                if self._is_closing:
                    return
                self._log(f"copies: a connection could not be taken: {problem}")
                time.sleep(_PAUSE_S)
                continue
            with connection, connection.makefile("rb") as stream:
                try:
                    self._attend(connection, stream)
                except Exception as problem:
                    self._log(f"copies: nothing was kept of what {host} sent: {type(problem).__name__}: {problem}")
                    with suppress(OSError):
                        _say_no(connection, str(problem))

    def _attend(self, connection: socket.socket, stream: io.BufferedReader) -> None:
        connection.settimeout(_GREETING_S)
        asked = str(_read_line(stream, 1024).get("owner_asks"))
        own = secrets.token_hex(16)
        _send_line(connection, {"keeper_asks": own, "proof": _proof(self._secret, "keeper", asked)})
        told = _read_line(stream, _MOST_LINE_BYTES)
        text = str(told.get("record"))
        if not _is_proof(told.get("proof"), self._secret, "owner", own, text):
            raise CopyFailed("it does not know the secret of this run")
        record = PartRecord.parse(text, "the record that came")
        name = record.name
        if (name.node, name.num_nodes) != (self._node, self._num_nodes):
            raise CopyFailed(f"copies of node {self._node} of {self._num_nodes} are kept here, not {name.folder}")
        if record.num_bytes > self._most_bytes:
            raise CopyFailed(f"{name.folder} has {record.num_bytes} bytes, and {self._most_bytes} were announced")
        boxes: dict[str, list[WrittenBox]] = {}
        for box in record.written:
            boxes.setdefault(box.placed.file, []).append(box)
        connection.settimeout(_SILENCE_S)
        _send_line(connection, {"go_on": True})
        with new_part(self._root, name) as temporary:
            for file, num_bytes in record.files.items():
                with (temporary / file).writing() as writer:
                    _receive_file(stream, writer, boxes[file], num_bytes)
            complete(temporary, record)
        _send_line(connection, {"ok": True})


def _blocks(record: PartRecord, parts: Sequence[Part]) -> Iterator[memoryview]:
    """All bytes of a part's files from the memory that they were written from."""
    crc32 = {(box.placed.file, box.placed.start): box.crc32 for box in record.written}
    for part in parts:
        for number, placed in enumerate(part.placed):
            archive, data = archive_of(placed.dtype, placed.sizes), part.raw_bytes(number)
            yield memoryview(archive.head)
            for start in range(0, len(data), _BLOCK_BYTES):
                yield data[start : start + _BLOCK_BYTES]
            yield memoryview(archive.tail(crc32[placed.file, placed.start]))


def _receive_file(stream: io.BufferedReader, writer: Writer, boxes: Sequence[WrittenBox], num_bytes: int) -> None:
    place = 0
    for box in boxes:
        placed = box.placed
        _receive(stream, writer, placed.start - place)
        if _receive(stream, writer, placed.num_bytes) != box.crc32:
            raise CopyFailed(f"{placed.name} came with another checksum than its owner told")
        place = placed.start + placed.num_bytes
    _receive(stream, writer, num_bytes - place)


def _receive(stream: io.BufferedReader, writer: Writer, num_bytes: int) -> int:
    """Pass so many bytes on to a file; their CRC-32."""
    if num_bytes < 0:
        raise ValueError("the boxes of the record overlap")
    crc32, left = 0, num_bytes
    block = memoryview(bytearray(min(_BLOCK_BYTES, num_bytes)))
    while left:
        count = stream.readinto(block[: min(left, len(block))])
        if not count:
            raise CopyFailed("the owner went away")
        crc32 = zlib.crc32(block[:count], crc32)
        writer.write(block[:count])
        left -= count
    return crc32


def _say_no(connection: socket.socket, why: str) -> None:
    """Tell an owner, and let it come to hear it: closed at once, the connection would take the answer along."""
    _send_line(connection, {"error": why})
    connection.shutdown(socket.SHUT_WR)
    connection.settimeout(_GREETING_S)
    deadline = time.monotonic() + _LINGER_S
    while connection.recv(1 << 20) and time.monotonic() < deadline:
        pass


def _proof(secret: str, *words: str) -> str:
    text = json.dumps(words).encode()
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def _is_proof(told: Any, secret: str, *words: str) -> bool:
    return isinstance(told, str) and hmac.compare_digest(told.encode(), _proof(secret, *words).encode())


def _send_line(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _read_line(stream: io.BufferedReader, most_bytes: int) -> dict[str, Any]:
    line = stream.readline(most_bytes)
    if not line.endswith(b"\n"):
        raise ValueError("the other end went away" if len(line) < most_bytes else "a line is too long")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("a line is no JSON object")
    return message

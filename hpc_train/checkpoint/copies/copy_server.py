"""Takes another node's parts over TCP and keeps them on this node's disk (see `copy_wire`). Needs no torch.

Each connection has a thread, until it has proved itself few of them and for a short time. Who has is given the turn:
one part at a time, and the newest connection is the one that counts.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

from hpc_train.checkpoint.copies.copy_wire import (
    BLOCK_BYTES,
    MOST_GREETING_BYTES,
    Conversation,
    CopyFailed,
    is_proof,
    proof,
)
from hpc_train.checkpoint.copies.local_folder import NodeFolder
from hpc_train.checkpoint.copies.local_parts import PartRecord
from hpc_train.checkpoint.format.placed import WrittenBox
from hpc_train.checkpoint.stores.store import Writer

Log = Callable[[str], None]

_MOST_STRANGERS = 8
"""Connections that have not proved themselves, at once; assumed: one is enough where nobody else comes."""
_TURN_S = 10.0
"""For the transfer before to see that it is not wanted any more; assumed: unless its disk hangs."""
_PAUSE_S = 0.1
"""Before the next try to take a connection that could not be taken, for want of descriptors as a rule (assumed)."""
_MOST_RECORD_BYTES = 256 << 20
"""Derived: 300 bytes a box, and a node's ranks have some 10,000 boxes. Read from those alone that know the secret."""
_TELL_EVERY_S = 60.0
"""Of strangers, so that they do not fill the log (assumed)."""


@final
class CopyServer:
    """Listens for the node whose copies are kept here, until it is closed."""

    def __init__(
        self, address: str, secret: str, folder: NodeFolder, node: int, num_nodes: int, most_bytes: int, log: Log
    ) -> None:
        """Listen, at a port of the kernel's choice.

        address: of this node, under which others reach it. node, num_nodes: whose parts, of how many nodes.
        most_bytes: of a part.

        Raises:
            OSError: the address is none of this node.
        """
        self._secret, self._folder, self._node, self._num_nodes = secret, folder, node, num_nodes
        self._most_bytes, self._log = most_bytes, log
        self._listener = socket.create_server((address, 0), backlog=_MOST_STRANGERS)
        self.port: int = self._listener.getsockname()[1]
        self._is_closing = False
        self._refused: str | None = None
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
        self._turn = threading.Lock()
        self._newest = 0
        self._told_at = -_TELL_EVERY_S
        threading.Thread(target=self._serve, name="copies", daemon=True).start()

    def refuse(self, why: str) -> None:
        """Keep nothing from now on, also of what is on its way."""
        self._refused = why

    def close(self, limit_s: float) -> None:
        """Take nothing more, after what is on its way now."""
        self._is_closing = True
        # Not close: that would leave the thread waiting in accept.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if not self._turn.acquire(timeout=limit_s):
            self._log(f"copies: what is on its way here is given up after {limit_s:g} s")
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
            if not self._strangers.acquire(blocking=False):
                connection.close()
                self._tell_of_stranger(f"{host} is turned away: {_MOST_STRANGERS} others have not said who they are")
                continue
            try:
                threading.Thread(target=self._attend, args=(connection, host), name="copy", daemon=True).start()
            except RuntimeError as problem:  # no thread is to be had
                connection.close()
                self._strangers.release()
                self._log(f"copies: a connection could not be taken: {problem}")

    def _attend(self, connection: socket.socket, host: str) -> None:
        with connection:
            other = Conversation(connection, lambda: None)
            try:
                try:
                    record_bytes, digest = self._greet(other)
                finally:
                    self._strangers.release()
            except Exception as problem:
                self._tell_of_stranger(f"{host} is no agent of this run: {type(problem).__name__}: {problem}")
                other.say_no(str(problem))
                return
            try:
                self._take(other, record_bytes, digest)
            except Exception as problem:
                self._log(f"copies: nothing was kept of what {host} sent: {type(problem).__name__}: {problem}")
                other.check = lambda: None
                other.say_no(str(problem))

    def _greet(self, other: Conversation) -> tuple[int, str]:
        """Length and digest of the record of who knows the secret."""
        asked = str(other.read_line(MOST_GREETING_BYTES).get("owner_asks"))
        own = secrets.token_hex(16)
        other.send_line({"keeper_asks": own, "proof": proof(self._secret, "keeper", asked)})
        told = other.read_line(MOST_GREETING_BYTES)
        length, digest = told.get("record_bytes"), told.get("sha256")
        if not is_proof(told.get("proof"), self._secret, "owner", own, str(length), str(digest)):
            raise CopyFailed("it does not know the secret of this run")
        other.greeted()
        return int(str(length)), str(digest)

    def _take(self, other: Conversation, record_bytes: int, digest: str) -> None:
        self._newest = number = self._newest + 1

        def check() -> None:
            if self._refused is not None:
                raise CopyFailed(self._refused)
            if number != self._newest:
                raise CopyFailed("a newer copy has come")

        other.check = check
        if not self._turn.acquire(timeout=_TURN_S):
            raise CopyFailed(f"a copy that came before is being written there, and does not end within {_TURN_S:g} s")
        try:
            record = self._record(other, record_bytes, digest)
            boxes: dict[str, list[WrittenBox]] = {}
            for box in record.written:
                boxes.setdefault(box.placed.file, []).append(box)
            other.send_line({"go_on": True})
            with self._folder.new_part(record.name) as temporary:
                for file, num_bytes in record.files.items():
                    with (temporary / file).writing() as writer:
                        _receive_file(other, writer, boxes[file], num_bytes)
                self._folder.complete(temporary, record, check)
        finally:
            self._turn.release()
        other.send_line({"ok": True})

    def _record(self, other: Conversation, num_bytes: int, digest: str) -> PartRecord:
        if not 0 < num_bytes <= _MOST_RECORD_BYTES:
            raise CopyFailed(f"a record of {num_bytes} bytes is not taken, {_MOST_RECORD_BYTES} are")
        text = bytearray(num_bytes)
        _receive_all(other, memoryview(text))
        if hashlib.sha256(text).hexdigest() != digest:
            raise CopyFailed("the record came otherwise than its owner told")
        record = PartRecord.parse(text.decode(), "the record that came")
        name = record.name
        if (name.node, name.num_nodes) != (self._node, self._num_nodes):
            raise CopyFailed(f"copies of node {self._node} of {self._num_nodes} are kept here, not {name.folder}")
        if record.num_bytes > self._most_bytes:
            raise CopyFailed(f"{name.folder} has {record.num_bytes} bytes, and {self._most_bytes} were announced")
        return record

    def _tell_of_stranger(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            self._log(f"copies: {text}")


def _receive_file(other: Conversation, writer: Writer, boxes: Sequence[WrittenBox], num_bytes: int) -> None:
    place = 0
    for box in boxes:
        placed = box.placed
        _pass_on(other, writer, placed.start - place)
        if _pass_on(other, writer, placed.num_bytes) != box.crc32:
            raise CopyFailed(f"{placed.name} came with another checksum than its owner told")
        place = placed.start + placed.num_bytes
    _pass_on(other, writer, num_bytes - place)


def _pass_on(other: Conversation, writer: Writer, num_bytes: int) -> int:
    """Pass so many bytes on to a file; their CRC-32."""
    if num_bytes < 0:
        raise ValueError("the boxes of the record overlap")
    crc32, left = 0, num_bytes
    block = memoryview(bytearray(min(BLOCK_BYTES, num_bytes)))
    while left:
        count = other.receive(block[: min(left, len(block))])
        crc32 = zlib.crc32(block[:count], crc32)
        writer.write(block[:count])
        left -= count
    return crc32


def _receive_all(other: Conversation, text: memoryview) -> None:
    while text:
        text = text[other.receive(text) :]

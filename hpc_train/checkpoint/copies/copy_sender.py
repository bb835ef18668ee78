"""Send a node's part to the node that keeps its copy (see `copy_wire`). Needs no torch."""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_train.checkpoint.copies.copy_wire import (
    BLOCK_BYTES,
    GREETING_S,
    MOST_ANSWER_BYTES,
    MOST_GREETING_BYTES,
    Conversation,
    CopyFailed,
    is_proof,
    proof,
)
from hpc_train.checkpoint.copies.local_parts import PartRecord
from hpc_train.checkpoint.files.parts import Part
from hpc_train.checkpoint.files.write import Flow
from hpc_train.checkpoint.format.archive import archive_of


@dataclass(frozen=True)
class Keeper:
    """Where the agent listens that keeps a node's copies."""

    address: str
    port: int
    secret: str

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def send_part(keeper: Keeper, record: PartRecord, parts: Sequence[Part], flow: Flow) -> None:
    """Have a part kept by another node; it is durable there when this returns. parts: what the record is of.

    Raises:
        CopyFailed: it is not.
        Abandoned: the flow was stopped.
    """
    try:
        with socket.create_connection((keeper.address, keeper.port), timeout=GREETING_S) as connection:
            _send(Conversation(connection, flow.check), keeper, record, parts, flow)
    except (OSError, ValueError) as problem:
        raise CopyFailed(f"the copy did not reach {keeper}: {type(problem).__name__}: {problem}") from problem
    except CopyFailed as problem:
        raise CopyFailed(f"the copy is not kept at {keeper}: {problem}") from problem


def _send(other: Conversation, keeper: Keeper, record: PartRecord, parts: Sequence[Part], flow: Flow) -> None:
    other.send_line({"owner_asks": (asked := secrets.token_hex(16))})
    greeting = other.read_line(MOST_GREETING_BYTES)
    if not is_proof(greeting.get("proof"), keeper.secret, "keeper", asked):
        raise CopyFailed("who listens there is no agent of this run")
    text = record.to_json().encode()
    length, digest = str(len(text)), hashlib.sha256(text).hexdigest()
    own = proof(keeper.secret, "owner", str(greeting.get("keeper_asks")), length, digest)
    other.send_line({"record_bytes": len(text), "sha256": digest, "proof": own})
    other.greeted()
    other.send(memoryview(text))
    _require(other, "go_on")
    for block in _blocks(record, parts):
        flow.pass_through(len(block))
        if other.has_answer():
            break
        other.send(block)
    _require(other, "ok")


def _require(other: Conversation, word: str) -> None:
    answer = other.read_line(MOST_ANSWER_BYTES)
    if word not in answer:
        raise CopyFailed(str(answer.get("error")))


def _blocks(record: PartRecord, parts: Sequence[Part]) -> Iterator[memoryview]:
    """All bytes of a part's files from the memory that they were written from."""
    crc32 = {(box.placed.file, box.placed.start): box.crc32 for box in record.written}
    for part in parts:
        for number, placed in enumerate(part.placed):
            archive, data = archive_of(placed.dtype, placed.sizes), part.raw_bytes(number)
            yield memoryview(archive.head)
            for start in range(0, len(data), BLOCK_BYTES):
                yield data[start : start + BLOCK_BYTES]
            yield memoryview(archive.tail(crc32[placed.file, placed.start]))

"""When a block of HDFS has rotted for good, and when a sound replica may be away: by what name node and client say."""

from __future__ import annotations

import pytest

from hpc_train.checkpoint.stores.backend import BackendReader, Buffer
from hpc_train.checkpoint.stores.cause import Cause, StoreError, is_unread
from hpc_train.checkpoint.stores.hdfs_causes import hdfs_cause
from hpc_train.checkpoint.stores.hdfs_native_look import known_rot
from hpc_train.checkpoint.stores.hdfs_replicas import LocatedBlock, reported_rot
from hpc_train.checkpoint.stores.local_store import LocalBackend
from hpc_train.checkpoint.stores.store import Patience, Store

MIB = 1 << 20


@pytest.mark.parametrize(
    ("replicas", "is_corrupt", "is_striped", "replication", "is_rotten"),
    [
        (2, True, False, 2, True),
        (3, True, False, 2, True),
        (1, True, False, 1, True),
        (2, False, False, 2, False),
        (1, True, False, 2, False),  # a sound one is on a dead data node (seen with Hadoop 2.7)
        (0, True, False, 2, False),  # all data nodes are dead (seen with Hadoop 2.7)
        (0, True, False, 0, False),
        (9, True, True, 1, False),
    ],
)
def test_a_block_has_rotted_where_all_its_replicas_are_named_as_corrupt(
    replicas: int, is_corrupt: bool, is_striped: bool, replication: int, is_rotten: bool
) -> None:
    sound = LocatedBlock(0, 4 * MIB, 2, False, is_striped)
    told = reported_rot([sound, LocatedBlock(4 * MIB, MIB, replicas, is_corrupt, is_striped)], replication)
    assert told == (
        f"all {replicas} replicas of its block at byte {4 * MIB} are corrupt, as the name node knows"
        if is_rotten
        else None
    )


# The client's log, as hdfs-native 0.14.7 wrote it, with a few of its figures.
NODE = """DatanodeInfoProto { id: DatanodeIdProto { ip_addr: "127.0.0.1", host_name: "localhost", \
datanode_uuid: "419c", xfer_port: 46647, info_port: 36837 }, capacity: Some(27), location: Some("/default-rack"), \
admin_state: Some(Normal), num_blocks: None }""".replace("\\\n", "")
BAD, BROKEN_OFF, DOWN = (
    f"[2026-12-01T05:09:49Z WARN  hdfs_native::hdfs::block_reader] {words}"
    for words in (
        "Error occurred while reading from DataNode: ChecksumError",
        'Error occurred while reading from DataNode: IOError(Custom { kind: UnexpectedEof, error: "early eof" })',
        f"Failed to connect to DataNode {NODE}: IOError(Os {{ code: 111, kind: ConnectionRefused }})",
    )
)


def _log(*attempts: str, named: int = 2, corrupt: str = "false", indices: str = "None", end: int = 4 * MIB) -> str:
    def block(number: int, start: int, num_bytes: int, corrupt: str) -> str:
        return (
            f'LocatedBlockProto {{ b: ExtendedBlockProto {{ pool_id: "BP-93-127.0.0.1-17", block_id: {number}, '
            f"generation_stamp: 1003, num_bytes: Some({num_bytes}) }}, offset: {start}, "
            f"locs: [{', '.join([NODE] * named)}], corrupt: {corrupt}, block_token: TokenProto {{ identifier: [], "
            f'kind: "" }}, is_cached: [false, false], storage_types: [Disk, Disk], block_indices: {indices}, '
            "block_tokens: [] }"
        )

    answer = (
        "GetBlockLocationsResponseProto { locations: Some(LocatedBlocksProto { file_length: 9437184, "
        f"blocks: [{block(7, 0, 4 * MIB, 'false')}, {block(8, 4 * MIB, 4 * MIB, corrupt)}, "
        f"{block(9, 8 * MIB, MIB, 'false')}] }}) }}"
    )
    lines = [
        f"[2026-12-01T05:09:49Z DEBUG hdfs_native::hdfs::protocol] getBlockLocations response: {answer}",
        f"reading {3 * MIB} to {4 * MIB}",
        BAD,  # of one replica of another block
        f"reading {4 * MIB} to {4 * MIB + end}",
        *attempts,
    ]
    return "\n".join([*lines, "RuntimeError: DataTransferError(..)", ""])


@pytest.mark.parametrize(
    ("replication", "log", "told"),
    [
        ("2\n", _log(BAD, BAD), "by their checksums"),
        ("2\n", _log(DOWN, DOWN, corrupt="true"), "as the name node knows"),
        ("2\n", _log(BROKEN_OFF, BROKEN_OFF), None),
        ("2\n", _log(BAD, DOWN), None),
        ("2\n", _log(DOWN, DOWN), None),
        ("2\n", _log(BAD, named=1), None),
        ("2\n", _log(BAD, named=1, corrupt="true"), None),
        ("3\n", _log(BAD, BAD), None),
        ("1\n", _log(BAD, BAD, indices="Some([0, 1])"), None),
        ("2\n", _log(BAD, BAD, end=5 * MIB), None),  # of two blocks: nobody knows of which one
        ("", _log(BAD, BAD), None),
        ("2\n", f"reading 0 to 9\n{BAD}\n{BAD}\n", None),
        ("2\n", "the words of another version", None),
    ],
)
def test_the_log_of_hdfs_native_tells_rot_where_every_replica_was_read(
    replication: str, log: str, told: str | None
) -> None:
    whole = None if told is None else f"all 2 replicas of its block at byte {4 * MIB} are corrupt, {told}"
    assert known_rot(replication, log) == whole


class _NoBytes(BackendReader):
    def read_into(self, start: int, buffer: Buffer) -> int:
        raise OSError("BlockMissingException")

    def close(self) -> None: ...


class _Rotting(LocalBackend):
    """Says of a block that it is not to be had, and on the `known_at`-th failure that it has rotted."""

    def __init__(self, known_at: int | None) -> None:
        super().__init__()
        self.known_at, self.asked = known_at, 0

    def open_read(self, path: str) -> BackendReader:
        return _NoBytes()

    def cause(self, problem: Exception) -> Cause:
        return hdfs_cause(str(problem))

    def rot(self, path: str, span: range, cause: Cause) -> str | None:
        assert (span, cause.is_of_file) == (range(7, 12), True)
        self.asked += 1
        return "all has rotted" if self.asked == self.known_at else None


@pytest.mark.parametrize(("known_at", "slept", "unread"), [(1, 0, False), (3, 2, False), (None, 3, True)])
def test_rot_is_asked_for_at_every_failure_and_not_waited_for(known_at: int | None, slept: int, unread: bool) -> None:
    """A data node that finds it needs its time."""
    backend, pauses = _Rotting(known_at), list[float]()
    store = Store("hdfs://x", lambda: backend, Patience(3.0, 1.0, 1.0, lambda: sum(pauses), pauses.append))
    with pytest.raises(StoreError, match="all has rotted. Tell the site" if not unread else "no data node") as failure:
        with store.reading("/f") as reader:
            reader.read_into(7, memoryview(bytearray(5)))
    assert (len(pauses), is_unread(failure.value)) == (slept, unread)

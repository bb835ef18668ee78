"""A part on its way between two agents: exact, or not kept at all; strangers, damage and silence are refused."""

from __future__ import annotations

import fcntl
import json
import mmap
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint.copies import copy_sender, copy_server, copy_wire
from hpc_train.checkpoint.copies.copy_sender import Keeper, send_part
from hpc_train.checkpoint.copies.copy_server import CopyServer
from hpc_train.checkpoint.copies.copy_wire import Conversation, CopyFailed, proof
from hpc_train.checkpoint.copies.local_folder import NodeFolder
from hpc_train.checkpoint.copies.local_parts import PartName, PartRecord, record_of, sound_parts
from hpc_train.checkpoint.files.parts import Part, write_parts
from hpc_train.checkpoint.files.write import Abandoned, Flow
from hpc_train.checkpoint.format.placed import file_of_rank, place_boxes
from hpc_train.errors import CheckpointError
from hpc_train.plan.flat import Box
from tests.node_agents import wait_until

NAME = PartName(7, "0a1", 1, 3)
SIZES = (1000, 5_000_000, 0)


def _parts() -> list[Part]:
    """Of two ranks with boxes of several sizes, and of one that has nothing."""
    parts = []
    for rank in range(2):
        boxes = [("w", (2, size), "uint8", Box((rank, 0), (1, size))) for size in SIZES if size]
        memory = mmap.mmap(-1, sum(SIZES))
        memory.write(bytes((place * 7 + rank) % 251 for place in range(1000)) * (sum(SIZES) // 1000))
        parts.append(Part(tuple(place_boxes(file_of_rank(rank), boxes)), (0, 1000), memory))
    return [*parts, Part((), (), mmap.mmap(-1, 64))]


def _folder(base: Path, name: str = "disk", attempt: str = "a1", node: int = 1) -> NodeFolder:
    """A run's folder on a node's disk."""
    return NodeFolder(base / name / "run", attempt, node)


def _own(folder: NodeFolder, parts: list[Part], name: PartName = NAME) -> PartRecord:
    with folder.new_part(name) as temporary:
        record = record_of(name, "a1", 5, {"told": 1}, write_parts(temporary, parts, Flow(), print))
        folder.complete(temporary, record, lambda: None)
    return record


@contextmanager
def _kept(folder: NodeFolder, log: list[str], **further: Any) -> Iterator[Keeper]:
    given = {"secret": "word", "node": 1, "num_nodes": 3, "most_bytes": 20_000_000, **further}
    secret, node, num_nodes, most_bytes = given.values()
    server = CopyServer("127.0.0.1", secret, folder, node, num_nodes, most_bytes, log.append)
    try:
        yield Keeper("127.0.0.1", server.port, "word")
    finally:
        server.close(10.0)


def _in(folder: NodeFolder) -> list[str]:
    """What is there of parts, whole or not."""
    return sorted(path.name for path in folder.path.iterdir() if path.is_dir())


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_kept_is_the_owner_s_part_byte_for_byte(tmp_path: Path) -> None:
    own, other, log, parts = _folder(tmp_path, "own"), _folder(tmp_path, "other", node=0), list[str](), _parts()
    record = _own(own, parts)
    with _kept(other, log) as keeper:
        send_part(keeper, record, parts, Flow())
    assert _in(other) == [NAME.folder]
    assert _contents(own.path / NAME.folder) == _contents(other.path / NAME.folder)
    assert sound_parts(other.path) == ([record], []) and log == []


def _of_other_bytes(record: PartRecord) -> PartRecord:
    last = record.written[-1]
    return replace(record, written=(*record.written[:-1], replace(last, crc32=last.crc32 ^ 1)))


@pytest.mark.parametrize(
    ("kept", "change", "why"),
    [
        ({"secret": "other"}, None, "no agent of this run"),
        ({"node": 2}, None, "copies of node 2 of 3 are kept here, not step_0000007.0a1.1-of-3"),
        ({"most_bytes": 1000}, None, "bytes, and 1000 were announced"),
        ({}, _of_other_bytes, "w came with another checksum than its owner told"),
    ],
)
def test_what_is_not_as_told_is_not_kept_and_the_next_one_is(tmp_path: Path, kept, change, why: str) -> None:
    log, parts = list[str](), _parts()
    record = _own(_folder(tmp_path, "own"), parts)
    other = _folder(tmp_path, "other")
    with _kept(other, log, **kept) as keeper:
        with pytest.raises(CopyFailed, match=why):
            send_part(keeper, record if change is None else change(record), parts, Flow())
        assert _in(other) == []
        if change is not None:
            send_part(keeper, record, parts, Flow())
            assert sound_parts(other.path) == ([record], [])


@contextmanager
def _stranger(keeper: Keeper) -> Iterator[socket.socket]:
    with socket.create_connection((keeper.address, keeper.port), timeout=20.0) as connection:
        yield connection


def _all_of(connection: socket.socket) -> bytes:
    """What comes until the other end closes."""
    data = b""
    try:
        while block := connection.recv(1 << 16):
            data += block
    except ConnectionError:
        pass
    return data


def test_who_does_not_know_the_secret_is_heard_shortly_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, parts, other = list[str](), _parts(), _folder(tmp_path, "other")
    record = _own(_folder(tmp_path, "own"), parts)
    with _kept(other, log) as keeper, _stranger(keeper) as silent:
        send_part(keeper, record, parts, Flow())  # beside one who says nothing
        other.keep_only(())
        with _stranger(keeper) as liar:
            liar.sendall(b'{"owner_asks": "1"}\n')
            assert b"proof" in liar.recv(1 << 16)
            liar.sendall(b'{"record_bytes": 2, "sha256": "00", "proof": "00"}\n')
            assert b"does not know the secret" in _all_of(liar)
        received: list[int] = []
        monkeypatch.setattr(copy_wire.Conversation, "_patiently", _counted(received))
        with _stranger(keeper) as talker:
            with suppress(ConnectionError):
                talker.sendall(b"x" * 100_000)
            _all_of(talker)
            assert 0 < sum(received) <= copy_wire.MOST_GREETING_BYTES
        silent.close()
    assert _in(other) == [] and len(log) == 1, "strangers do not fill the log"


def _counted(received: list[int]) -> Any:
    real = copy_wire.Conversation._patiently

    def patiently(self: Any, act: Any, what: Any) -> Any:
        found = real(self, act, what)
        received.append(len(found) if isinstance(found, bytes) else 0)
        return found

    return patiently


def test_strangers_are_few_and_have_little_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, parts, other = list[str](), _parts(), _folder(tmp_path, "other")
    record = _own(_folder(tmp_path, "own"), parts)
    monkeypatch.setattr(copy_wire, "GREETING_S", 1.0)
    monkeypatch.setattr(copy_wire, "_TICK_S", 0.05)
    monkeypatch.setattr(copy_server, "_MOST_STRANGERS", 2)
    with _kept(other, log) as keeper, _stranger(keeper) as first, _stranger(keeper) as second:
        with _stranger(keeper) as third:
            assert _all_of(third) == b""
        with suppress(ConnectionError):  # left already
            for byte in b'{"own':  # each within the silence that is borne, all of them too late
                first.sendall(bytes([byte]))
                time.sleep(0.1)
        assert _all_of(first) == _all_of(second) == b"", "both are left"
        send_part(keeper, record, parts, Flow())
    assert _in(other) == [NAME.folder]


def test_an_owner_that_dies_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, parts, other = list[str](), _parts(), _folder(tmp_path, "other")
    record = _own(_folder(tmp_path, "own"), parts)
    blocks = copy_sender._blocks

    def some(record: PartRecord, parts: list[Part]) -> Iterator[memoryview]:
        yield next(iter(blocks(record, parts)))
        raise OSError("the owner dies")

    with _kept(other, log) as keeper:
        monkeypatch.setattr(copy_sender, "_blocks", some)
        with pytest.raises(CopyFailed, match="the owner dies"):
            send_part(keeper, record, parts, Flow())
        monkeypatch.setattr(copy_sender, "_blocks", blocks)
        send_part(keeper, record, parts, Flow())
    assert _in(other) == [NAME.folder]
    assert sum("nothing was kept" in line for line in log) == 1


def test_an_answer_is_seen_in_a_process_with_many_descriptors() -> None:
    """select() takes none from 1024 on."""
    near, far = socket.socketpair()
    with near, far, socket.socket(fileno=fcntl.fcntl(near, fcntl.F_DUPFD_CLOEXEC, 1024)) as high:
        other = Conversation(high, lambda: None)
        assert not other.has_answer()
        far.sendall(b"x")
        assert other.has_answer()
        far.close()
        assert near.recv(1) == b"x" and other.has_answer(), "one that has gone is heard of too"


def test_a_keeper_that_is_not_there_is_told(tmp_path: Path) -> None:
    parts, folder = _parts(), _folder(tmp_path)
    record = _own(folder, parts)
    with _kept(folder, []) as keeper:
        pass
    with pytest.raises(CopyFailed, match=re.escape(f"did not reach 127.0.0.1:{keeper.port}")):
        send_part(keeper, record, parts, Flow())


@contextmanager
def _hanging_keeper() -> Iterator[Keeper]:
    """It proves itself, says that the owner shall go on, and reads no more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connections.append(listener.accept()[0])
            asked = json.loads(connections[0].recv(1024))["owner_asks"]
            greeting = {"keeper_asks": "1", "proof": proof("word", "keeper", asked)}
            connections[0].sendall(json.dumps(greeting).encode() + b"\n" + b'{"go_on": true}\n')

        connections: list[socket.socket] = []
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Keeper("127.0.0.1", listener.getsockname()[1], "word")
        finally:
            thread.join()
            connections[0].close()


def test_a_keeper_that_hangs_is_left_in_time_or_at_once_where_the_copy_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = _parts()
    record = _own(_folder(tmp_path), parts)
    monkeypatch.setattr(copy_wire, "_TICK_S", 0.05)
    flow = Flow()
    with _hanging_keeper() as keeper:
        threading.Timer(0.3, flow.stop, ["the store goes first"]).start()
        with pytest.raises(Abandoned, match="the store goes first"):
            send_part(keeper, record, parts, flow)
    monkeypatch.setattr(copy_wire, "SILENCE_S", 0.3)
    with _hanging_keeper() as keeper, pytest.raises(CopyFailed, match=f"at {keeper}: the other end has been silent"):
        send_part(keeper, record, parts, Flow())


def test_the_newest_copy_pushes_the_one_before_aside_and_none_is_kept_that_has_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, other, goes_on, ends, blocks = _parts(), _folder(tmp_path), threading.Event(), [], copy_sender._blocks
    record = _own(_folder(tmp_path, "own"), parts)
    monkeypatch.setattr(copy_wire, "_TICK_S", 0.05)
    monkeypatch.setattr(copy_server, "_TURN_S", 5.0)

    def some(record: PartRecord, parts: list[Part]) -> Iterator[memoryview]:
        for block in blocks(record, parts):
            yield block
            if threading.current_thread() is slow:
                goes_on.wait(20.0)

    def send_slowly() -> None:
        with pytest.raises(CopyFailed) as raised:
            send_part(keeper, record, parts, Flow())
        ends.append(str(raised.value))

    monkeypatch.setattr(copy_sender, "_blocks", some)
    slow = threading.Thread(target=send_slowly)
    server = CopyServer("127.0.0.1", "word", other, 1, 3, 20_000_000, print)
    keeper = Keeper("127.0.0.1", server.port, "word")
    try:
        slow.start()
        wait_until(lambda: _in(other) != [])
        send_part(keeper, record, parts, Flow())
        assert NAME.folder in _in(other)
        goes_on.set()
        slow.join()
        assert ["a newer copy has come" in end for end in ends] == [True]
        other.keep_only(())
        server.refuse("the store has it")
        with pytest.raises(CopyFailed, match="the store has it"):
            send_part(keeper, record, parts, Flow())
        assert _in(other) == []
    finally:
        goes_on.set()
        server.close(10.0)


def test_a_part_that_is_given_up_after_its_last_byte_gets_no_name_and_costs_no_other_one(tmp_path: Path) -> None:
    parts, folder, flow = _parts(), _folder(tmp_path), Flow()
    _own(folder, parts)
    later = PartName(8, "0a2", 1, 3)
    with pytest.raises(Abandoned, match="the store goes first"), folder.new_part(later) as temporary:
        record = record_of(later, "a1", 5, None, write_parts(temporary, parts, flow, print))
        flow.stop("the store goes first")
        folder.complete(temporary, record, flow.check)
    with pytest.raises(Abandoned, match="the store goes first"):
        folder.keep_only((), flow.check)
    assert _in(folder) == [NAME.folder]


def test_only_whole_parts_are_sound_and_only_those_of_saves_that_count_are_left(tmp_path: Path) -> None:
    parts, folder = _parts(), _folder(tmp_path)
    path = folder.path
    good = _own(folder, parts)
    cut, lost = PartName(8, "0a2", 1, 3), PartName(9, "0a3", 1, 3)
    _own(folder, parts, cut)
    _own(folder, parts, lost)
    with (path / cut.folder / file_of_rank(0)).open("r+b") as file:
        file.truncate(100)
    (path / lost.folder / "part.json").unlink()
    (path / f".{PartName(10, '0a4', 1, 3).folder}.tmp-00ff").mkdir()
    (path / "of somebody else").mkdir()
    found, faults = sound_parts(path)
    assert found == [good]
    assert sorted("is not what its record says" in fault for fault in faults) == [False, True]
    folder.keep_only({"0a1"})
    assert _in(folder) == ["of somebody else", NAME.folder]


def test_a_part_whose_writing_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    with pytest.raises(CheckpointError), folder.new_part(NAME):
        raise CheckpointError("the disk is full")
    assert _in(folder) == []


def test_an_earlier_start_changes_nothing_once_the_next_one_has_the_folder(tmp_path: Path) -> None:
    parts, earlier = _parts(), _folder(tmp_path, attempt="a1")
    _own(earlier, parts)
    with earlier.new_part(PartName(9, "0a9", 1, 3)) as temporary:
        later = _folder(tmp_path, attempt="a2", node=2)
        record = record_of(PartName(9, "0a9", 1, 3), "a1", 5, None, write_parts(temporary, parts, Flow(), print))
        with pytest.raises(CheckpointError, match="another start of the run has"):
            earlier.complete(temporary, record, lambda: None)
        with pytest.raises(CheckpointError, match="another start of the run has"):
            earlier.keep_only(())
    assert [record.name for record in sound_parts(later.path)[0]] == [NAME]
    later.keep_only(())
    assert _in(later) == []


def test_a_folder_is_one_node_s_and_this_user_s_alone(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    assert [path.stat().st_mode & 0o077 for path in (folder.path, folder.path.parent, folder.path / "lock")] == [0] * 3
    with pytest.raises(CheckpointError, match=f"{tmp_path} is one and the same for nodes 1 and 2 of this job"):
        _folder(tmp_path, node=2)
    folder.path.chmod(0o755)
    with pytest.raises(CheckpointError, match=r"can be entered by others \(mode 755\)"):
        _folder(tmp_path)


def test_a_folder_that_the_site_has_removed_is_made_again(tmp_path: Path) -> None:
    parts, folder = _parts(), _folder(tmp_path)
    for path in (folder.path / "lock", folder.path / "claim.json"):
        path.unlink()
    folder.path.rmdir()
    folder.path.parent.rmdir()
    record = _own(folder, parts)
    assert sound_parts(folder.path) == ([record], []) and folder.path.parent.stat().st_mode & 0o077 == 0


def test_records_that_are_no_records_are_refused(tmp_path: Path) -> None:
    text = PartRecord(NAME, "a1", None, None, (), {}).to_json()
    assert PartRecord.parse(text, "x").name == NAME
    for wrong in (text.replace("step_0000007", "step_0000008"), text[:-5], "[]", ""):
        with pytest.raises(CheckpointError, match=r"^x "):
            PartRecord.parse(wrong, "x")
    good = _own(_folder(tmp_path), _parts())
    (box, *_), file = good.written, file_of_rank(0)
    upwards = replace(box, placed=replace(box.placed, file="../x"))
    for record in (
        PartRecord(NAME, "a1", None, None, (), {"x": 1}),
        replace(good, files={**good.files, file: good.files[file] + 1}),
        replace(good, written=(upwards,), files={"../x": box.placed.item_start + box.placed.item_bytes}),
    ):
        with pytest.raises(CheckpointError, match="its files are not those of its boxes"):
            PartRecord.parse(record.to_json(), "x")

"""A part on its way between two agents: exact, or not kept at all; strangers, damage and silence are refused."""

from __future__ import annotations

import mmap
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint import copy_wire
from hpc_train.checkpoint.copy_wire import CopyFailed, CopyServer, Keeper, send_part
from hpc_train.checkpoint.local_parts import (
    PartName,
    PartRecord,
    complete,
    new_part,
    record_of,
    remove_others,
    sound_parts,
)
from hpc_train.checkpoint.location import locate
from hpc_train.checkpoint.node_save import Part, write_parts
from hpc_train.checkpoint.placed import file_of_rank, place_boxes
from hpc_train.checkpoint.write import Flow
from hpc_train.errors import CheckpointError
from hpc_train.plan.flat import Box

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


def _own(root: Path, parts: list[Part], name: PartName = NAME) -> PartRecord:
    with new_part(locate(root), name) as temporary:
        record = record_of(name, 5, {"told": 1}, write_parts(temporary, parts, Flow(), print))
        complete(temporary, record)
    return record


@contextmanager
def _kept(root: Path, log: list[str], **further: Any) -> Iterator[Keeper]:
    given = {"secret": "word", "node": 1, "num_nodes": 3, "most_bytes": 20_000_000, **further}
    server = CopyServer(
        "127.0.0.1", given["secret"], locate(root), given["node"], given["num_nodes"], given["most_bytes"], log.append
    )
    try:
        yield Keeper("127.0.0.1", server.port, "word")
    finally:
        server.close(10.0)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_kept_is_the_owner_s_part_byte_for_byte(tmp_path: Path) -> None:
    own, other, log, parts = tmp_path / "own", tmp_path / "other", list[str](), _parts()
    other.mkdir(mode=0o700)
    record = _own(own, parts)
    with _kept(other, log) as keeper:
        send_part(keeper, record, parts, Flow())
    assert [path.name for path in other.iterdir()] == [NAME.folder]
    assert _contents(own / NAME.folder) == _contents(other / NAME.folder)
    assert sound_parts(other) == ([record], []) and log == []


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
    record = _own(tmp_path / "own", parts)
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    with _kept(other, log, **kept) as keeper:
        with pytest.raises(CopyFailed, match=why):
            send_part(keeper, record if change is None else change(record), parts, Flow())
        assert list(other.iterdir()) == []
        if change is not None:
            send_part(keeper, record, parts, Flow())
            assert sound_parts(other) == ([record], [])


def test_who_does_not_know_the_secret_or_goes_away_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, parts = list[str](), _parts()
    record = _own(tmp_path / "own", parts)
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    with _kept(other, log) as keeper:
        with socket.create_connection((keeper.address, keeper.port)) as stranger, stranger.makefile("rb") as lines:
            stranger.sendall(b'{"owner_asks": "1"}\n')
            assert b"proof" in lines.readline()
            stranger.sendall(b'{"record": "{}", "proof": "00"}\n')
            assert b"does not know the secret" in lines.readline()
        monkeypatch.setattr(copy_wire, "_GREETING_S", 0.2)
        with socket.create_connection((keeper.address, keeper.port)) as silent, silent.makefile("rb") as lines:
            assert b"error" in lines.readline()
        monkeypatch.setattr(copy_wire, "_GREETING_S", 10.0)
        stops = Flow()
        blocks = copy_wire._blocks

        def some(record: PartRecord, parts: list[Part]) -> Iterator[memoryview]:
            yield next(iter(blocks(record, parts)))
            raise OSError("the owner dies")

        monkeypatch.setattr(copy_wire, "_blocks", some)
        with pytest.raises(CopyFailed, match="the owner dies"):
            send_part(keeper, record, parts, stops)
        monkeypatch.setattr(copy_wire, "_blocks", blocks)
        send_part(keeper, record, parts, Flow())
    assert [path.name for path in other.iterdir()] == [NAME.folder]
    assert sum("nothing was kept" in line for line in log) == 3


def test_a_keeper_that_is_not_there_is_told(tmp_path: Path) -> None:
    parts = _parts()
    record = _own(tmp_path, parts)
    with _kept(tmp_path, []) as keeper:
        pass
    with pytest.raises(CopyFailed, match=re.escape(f"did not reach 127.0.0.1:{keeper.port}")):
        send_part(keeper, record, parts, Flow())


def test_only_whole_parts_are_sound_and_only_those_of_saves_that_count_are_left(tmp_path: Path) -> None:
    parts = _parts()
    good = _own(tmp_path, parts)
    cut, lost = PartName(8, "0a2", 1, 3), PartName(9, "0a3", 1, 3)
    _own(tmp_path, parts, cut)
    _own(tmp_path, parts, lost)
    with (tmp_path / cut.folder / file_of_rank(0)).open("r+b") as file:
        file.truncate(100)
    (tmp_path / lost.folder / "part.json").unlink()
    (tmp_path / f".{PartName(10, '0a4', 1, 3).folder}.tmp-00ff").mkdir()
    (tmp_path / "of somebody else").mkdir()
    found, faults = sound_parts(tmp_path)
    assert found == [good]
    assert sorted("is not what its record says" in fault for fault in faults) == [False, True]
    tmp_path.chmod(0o755)
    assert sound_parts(tmp_path) == (
        [],
        [f"{tmp_path} is not ours alone, so that what is in it may be somebody else's"],
    )
    remove_others(locate(tmp_path), {"0a1"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of somebody else", NAME.folder]


def test_a_part_whose_writing_fails_leaves_nothing(tmp_path: Path) -> None:
    tmp_path = tmp_path / "disk"
    with pytest.raises(CheckpointError), new_part(locate(tmp_path), NAME):
        raise CheckpointError("the disk is full")
    assert list(tmp_path.iterdir()) == []


def test_records_that_are_no_records_are_refused() -> None:
    text = PartRecord(NAME, None, None, (), {}).to_json()
    assert PartRecord.parse(text, "x").name == NAME
    for wrong in (text.replace("step_0000007", "step_0000008"), text[:-5], "[]", ""):
        with pytest.raises(CheckpointError, match=r"^x "):
            PartRecord.parse(wrong, "x")
    upwards = PartRecord(NAME, None, None, (), {"../x": 1}).to_json()
    with pytest.raises(CheckpointError, match="its files are not those of its boxes"):
        PartRecord.parse(upwards, "x")

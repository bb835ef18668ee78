"""Copies in the agent: the store goes first, what hangs is named and left, and no part is of two states."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint.copies import copy_keeper
from hpc_train.checkpoint.copies.copy_keeper import NodeCopies
from hpc_train.checkpoint.copies.copy_service import CopyService
from hpc_train.checkpoint.copies.local_check import damage_of
from hpc_train.checkpoint.copies.local_parts import sound_parts
from hpc_train.checkpoint.files.write import Flow
from hpc_train.checkpoint.saving.node_writer import CheckpointService
from hpc_train.checkpoint.stores import local_store
from hpc_train.checkpoint.stores.location import locate
from hpc_train.errors import CheckpointError
from tests.agents import ServedAgent, served
from tests.checkpoint.saving.node_ranks import NodeRank, check_step
from tests.node_agents import wait_until

ORDER = {"keep": [], "store_step": None}


class _Node:
    """A node with one rank, an agent, a store and a disk."""

    def __init__(self, agent: ServedAgent, base: Path) -> None:
        self.log, self.disk, self.store = agent.log, base / "disk" / "run", base / "store"
        self.rank = NodeRank(agent, self.store, 0, 1)
        assert self.rank.opened == {"ok": True}
        assert self.rank.ask(_keep(self.disk)) == {"port": None, "has_room": True}

    def begin(self, token: str, step: int, *, is_for_store: bool, is_sure: bool = False) -> dict[str, Any]:
        """is_sure: as ranks do it, in a second question."""
        answer = self.rank.begin(token, step, is_for_store=is_for_store)
        return self.rank.begin(token, step, is_for_store=is_for_store, is_sure=True) if is_sure else answer

    def begin_copy(self, token: str, step: int) -> dict[str, Any]:
        """Begin and take a save for the disk alone; the answer that it began with."""
        deadline = time.monotonic() + 20.0
        while (answer := self.begin(token, step, is_for_store=False))["busy"] is not None:
            assert time.monotonic() < deadline, answer
            time.sleep(0.005)
        self.rank.take(token, step, is_for_store=False, copy=ORDER)
        return answer

    def wait_for_part(self, step: int) -> None:
        name = f"step_{step:07d}."
        wait_until(lambda: any(path.name.startswith(name) for path in self.disk.iterdir()))

    def wait_until_empty(self) -> None:
        """Of parts, whole or not."""
        wait_until(lambda: not any(path.is_dir() for path in self.disk.iterdir()))

    def parts(self) -> list[int]:
        """The steps of parts, all of whose bytes are right."""
        records, faults = sound_parts(self.disk)
        assert faults == []
        for record in records:
            assert damage_of(locate(self.disk) / record.name.folder, record.written) is None
        return [record.name.step for record in records]


def _keep(disk: Path, **further: Any) -> dict[str, Any]:
    return {
        "say": "copies.keep", "session": "0a", "folder": str(disk), "attempt": "a1", "node": 0, "num_nodes": 1,
        "own_bytes": 2000, "kept_node": 0, "kept_bytes": 0, "address": "", "secret": "word", "keep": 1,
        "most_bytes": None, "bytes_per_s": None, "finish_s": 20.0, **further,
    }  # fmt: skip


@pytest.fixture
def disk_hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk takes one block and hangs, in the copy of step 1, until the event is set."""
    goes_on, real = threading.Event(), copy_keeper.write_parts

    def write_parts(folder: Any, parts: Any, flow: Flow, log: Any) -> Any:
        if ".step_0000001." in str(folder):
            goes_on.wait()
        return real(folder, parts, flow, log)

    monkeypatch.setattr(copy_keeper, "write_parts", write_parts)
    yield goes_on
    goes_on.set()


@contextmanager
def _node(base: Path) -> Iterator[_Node]:
    log: list[str] = []
    copies = CopyService(log.append)
    with served([CheckpointService(log.append, copies), copies]) as agent:
        agent.log = log
        yield _Node(agent, base)


def test_a_save_to_the_store_does_not_wait_for_a_copy_that_hangs(tmp_path: Path, disk_hangs: threading.Event) -> None:
    with _node(tmp_path) as node:
        node.begin_copy("0a1", 1)
        wait_until(lambda: any(path.is_dir() for path in node.disk.iterdir()))
        assert node.begin("0a2", 2, is_for_store=False)["busy"]["step"] == 1, "a copy does not push another aside"
        assert node.begin("0a3", 3, is_for_store=True, is_sure=True)["busy"] is None
        node.rank.take("0a3", 3)
        assert node.rank.wait("0a3", commit=True)["failed"] is None
        check_step(node.store, 3, 1)
        disk_hangs.set()
        told = node.begin_copy("0a4", 4)["copies"]
        assert told == {"whole_here": None, "kept_twice": None, "problem": None}, "to make room is no fault"
        node.wait_for_part(4)
        assert node.parts() == [4], "what was given up has never become a part"
    assert any("step 1: the save of step 3 to the store goes first" in line for line in node.log)


def test_a_save_to_the_store_that_is_left_out_stops_no_copy(tmp_path: Path, disk_hangs: threading.Event) -> None:
    """Another node is busy still, which ranks hear of when this one has said that it is not."""
    with _node(tmp_path) as node:
        node.begin_copy("0a1", 1)
        assert node.begin("0a2", 2, is_for_store=True)["busy"] is None
        node.rank.tell("cancel", "0a2")
        assert node.begin("0a3", 3, is_for_store=False)["busy"]["step"] == 1, "the memory is in use"
        disk_hangs.set()
        node.wait_for_part(1)
        assert node.parts() == [1]


def test_a_copy_that_hangs_is_named_and_the_next_ones_are_made_when_the_disk_is_back(
    tmp_path: Path, disk_hangs: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_keeper, "SILENCE_S", 0.3)
    monkeypatch.setattr(copy_keeper, "_BEFORE_S", 0.1)
    with _node(tmp_path) as node:
        node.begin_copy("0a1", 1)
        told = node.begin_copy("0a2", 2)["copies"]
        assert told["problem"] == "node 0: nothing of the copy of step 1 has moved for 0.3 s, and it is given up"
        for step in (3, 4):
            told = node.begin_copy(f"0a{step}", step)["copies"]
            assert told["problem"] == f"node 0: the copy of step 1 hangs still, so that step {step - 1} is not copied"
        disk_hangs.set()
        deadline = time.monotonic() + 20.0
        for step in range(5, 1000):
            assert time.monotonic() < deadline, told
            if (told := node.begin_copy(f"0a{step:x}", step)["copies"])["problem"] is None:
                break
        node.wait_for_part(step)
        assert node.parts() == [step]


def test_a_full_disk_is_named_leaves_nothing_and_stops_neither_the_store_nor_the_next_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_full = local_store._LocalWriter.write, True

    def write(self: Any, data: memoryview) -> None:
        if is_full and "/disk/" in str(self._file.name):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, data)

    monkeypatch.setattr(local_store._LocalWriter, "write", write)
    with _node(tmp_path) as node:
        node.begin_copy("0a1", 1)
        told = node.begin_copy("0a2", 2)["copies"]
        assert told["whole_here"] is None and "no space is left" in told["problem"]
        wait_until(lambda: node.begin("0a3", 3, is_for_store=True)["busy"] is None)
        node.rank.take("0a3", 3)
        assert node.rank.wait("0a3", commit=True)["failed"] is None
        node.wait_until_empty()
        is_full = False
        node.begin_copy("0a4", 4)
        node.wait_for_part(4)
        assert node.parts() == [4]


def test_an_agent_ends_although_a_copy_hangs_and_after_one_that_does_not(
    tmp_path: Path, disk_hangs: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "well").mkdir()
    with _node(tmp_path / "well") as node:
        node.begin_copy("0a7", 7)
    assert node.parts() == [7]
    monkeypatch.setattr(copy_keeper, "SILENCE_S", 0.3)
    (tmp_path / "hangs").mkdir()
    with _node(tmp_path / "hangs") as node:
        node.begin_copy("0a1", 1)
    assert not disk_hangs.is_set()


def test_a_copy_that_has_lost_its_use_is_not_kept_and_no_more_are(tmp_path: Path) -> None:
    with _node(tmp_path) as node:
        node.begin_copy("0a1", 1)
        node.wait_for_part(1)
        node.rank.ask({"say": "copies.drop", "session": "0a"})
        node.wait_until_empty()
        node.begin_copy("0a2", 2)
        node.begin_copy("0a3", 3)
    assert node.parts() == []


def test_memory_that_the_job_has_not_is_no_room_for_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    monkeypatch.setattr(copy_keeper, "file_system_of", lambda path: "tmpfs")
    monkeypatch.setattr(copy_keeper, "available_memory_bytes", lambda: 3000)
    with pytest.raises(CheckpointError, match=r"\. 30\d\d bytes are to be had .* is memory\. .*\(--mem\)"):
        NodeCopies(_keep(tmp_path / "disk" / "run"), print)
    for available, has_room in ((4000, False), (6000, True)):
        monkeypatch.setattr(copy_keeper, "available_memory_bytes", lambda available=available: available)
        assert NodeCopies(_keep(tmp_path / "disk" / "run"), print).has_room == has_room

"""The node agent's writing: what was handed over is committed whatever becomes of ranks, and nothing else is."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hpc_train.checkpoint.files import parts
from hpc_train.checkpoint.folders import folder
from hpc_train.checkpoint.folders.attempt import begin_attempt
from hpc_train.checkpoint.saving import node_save, node_session, node_writer
from hpc_train.checkpoint.saving.node_writer import CheckpointService
from hpc_train.checkpoint.stores import local_store
from hpc_train.checkpoint.stores.cause import StoreError
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.checkpoint.stores.visible import wait_for_file
from tests.agents import ServedAgent, served
from tests.checkpoint.saving.node_ranks import NodeRank, check_step, left_over, told
from tests.cluster.test_memory_segment import descriptors_of


@pytest.fixture
def agent() -> Iterator[ServedAgent]:
    log: list[str] = []
    with served([CheckpointService(log.append)]) as running:
        running.log = log
        yield running


def _two(agent: ServedAgent, root: Path, **more) -> list[NodeRank]:
    return [NodeRank(agent, root, rank, 2, **more) for rank in range(2)]


def _begin(ranks: list[NodeRank], token: str, step: int) -> None:
    for rank in ranks:
        assert rank.begin(token, step) == {"busy": None, "failed": None}


def _eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_saves_follow_one_another_from_the_same_memory(agent: ServedAgent, tmp_path: Path) -> None:
    root, run_dir = tmp_path / "there", tmp_path / "run"
    run_dir.mkdir()
    ranks = _two(agent, root, keep=2, note_dir=str(run_dir))
    assert [rank.opened for rank in ranks] == [{"ok": True}] * 2
    for step in (1, 2, 3):
        _begin(ranks, f"0a{step}", step)
        for rank in ranks:
            assert rank.take(f"0a{step}", step) == {"ok": True}
        assert ranks[1].wait(f"0a{step}", commit=False)["failed"] is None
        done = ranks[0].wait(f"0a{step}", commit=True)
        assert (done["failed"], done["step"]) == (None, step) and 0 < done["seconds"] < 20
        check_step(root, step, 2)
        assert told(run_dir) == {"folder": str(root), "newest_step": step}
    # Older ones are removed when ranks have heard of the commit.
    _eventually(lambda: sorted(path.name for path in root.iterdir()) == ["latest", "step_0000002", "step_0000003"])


def test_ranks_that_end_after_their_copy_are_not_needed(agent: ServedAgent, tmp_path: Path) -> None:
    ranks = _two(agent, tmp_path, bytes_per_s=2000)
    _begin(ranks, "0a1", 7)
    for rank in ranks:
        rank.take("0a1", 7)
    for rank in ranks:
        rank.connection.close()
        rank.segment.close()
    _eventually(lambda: (tmp_path / "latest").exists())
    check_step(tmp_path, 7, 2)
    assert left_over(tmp_path) == []


def test_an_agent_that_is_told_to_end_writes_what_it_has(tmp_path: Path) -> None:
    with served([CheckpointService(lambda text: None)]) as agent:
        ranks = _two(agent, tmp_path, bytes_per_s=2000)
        _begin(ranks, "0a1", 7)
        for rank in ranks:
            rank.take("0a1", 7)
        assert not (tmp_path / "latest").exists()
    check_step(tmp_path, 7, 2)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_rank_that_ends_before_its_copy_fails_the_save(agent: ServedAgent, tmp_path: Path, taken: int) -> None:
    ranks = _two(agent, tmp_path)
    _begin(ranks, "0a1", 7)
    if taken:
        ranks[0].take("0a1", 7)
    ranks[1].connection.close()
    failed = ranks[0].wait("0a1", commit=True)["failed"]
    assert failed == "rank 1 ended before its part of step 7 was copied"
    assert left_over(tmp_path) == [] and not (tmp_path / "latest").exists()
    assert ranks[0].begin("0a2", 8) == {"busy": None, "failed": ["0a1", failed]}
    assert ranks[0].wait("0a2", commit=True)["failed"] == "a rank of this node has ended"


def test_an_agent_that_ends_before_all_copies_are_whole_leaves_nothing(tmp_path: Path) -> None:
    with served([CheckpointService(lambda text: None)]) as agent:
        ranks = _two(agent, tmp_path)
        _begin(ranks, "0a1", 7)
        ranks[0].take("0a1", 7)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_is_due_while_one_is_written_hears_how_far_that_is(agent: ServedAgent, tmp_path: Path) -> None:
    ranks = _two(agent, tmp_path, num_bytes=1000, bytes_per_s=2000)
    _begin(ranks, "0a1", 7)
    for rank in ranks:
        rank.take("0a1", 7)
    busy = ranks[0].begin("0a2", 8)["busy"]
    assert (busy["step"], busy["num_bytes"]) == (7, 2000) and 0 <= busy["written_bytes"] <= 2000
    for rank in ranks:
        rank.tell("cancel", "0a2")
    assert ranks[0].wait("0a1", commit=True)["failed"] is None
    _begin(ranks, "0a3", 8)
    for rank in ranks:
        rank.tell("cancel", "0a3")
    _begin(ranks, "0a4", 9)
    for rank in ranks:
        rank.take("0a4", 9)
    assert ranks[0].wait("0a4", commit=True)["failed"] is None
    check_step(tmp_path, 9, 2)


def test_what_a_store_refuses_is_named_and_leaves_the_checkpoint_before(agent: ServedAgent, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ranks = _two(agent, tmp_path / "file" / "below")
    _begin(ranks, "0a1", 7)
    for rank in ranks:
        rank.take("0a1", 7)
    failed = ranks[0].wait("0a1", commit=True)["failed"]
    assert "a file stands where a folder is needed" in failed and str(tmp_path / "file") in failed
    assert any("step 7 is not saved" in line for line in agent.log)


@pytest.fixture
def nodes(agent: ServedAgent, tmp_path: Path) -> Iterator[list[NodeRank]]:
    """Two nodes with a rank each."""
    with ExitStack() as stack:
        other = stack.enter_context(served([CheckpointService(agent.log.append)], node="n2"))
        agents = [agent, other]
        yield [
            NodeRank(agents[rank], tmp_path, rank, 2, count=1, node_rank=rank, num_nodes=2, session="0b")
            for rank in range(2)
        ]


def test_the_node_of_rank_0_commits_when_the_parts_of_all_nodes_are_there(
    nodes: list[NodeRank], tmp_path: Path
) -> None:
    _begin(nodes, "0b1", 5)
    nodes[0].take("0b1", 5)
    assert nodes[0].wait("0b1", commit=False)["failed"] is None
    assert nodes[0].begin("0b2", 6)["busy"]["step"] == 5, "the other node's part is missing"
    nodes[1].take("0b1", 5)
    assert nodes[1].wait("0b1", commit=True)["failed"] is None
    assert nodes[0].wait("0b1", commit=True)["failed"] is None
    check_step(tmp_path, 5, 2)
    assert left_over(tmp_path) == []


def test_a_node_that_fails_tells_the_node_of_rank_0(nodes: list[NodeRank], tmp_path: Path) -> None:
    _begin(nodes, "0b1", 5)
    nodes[0].take("0b1", 5)
    nodes[1].connection.close()
    failed = nodes[0].wait("0b1", commit=True)["failed"]
    assert failed == "node 1: rank 1 ended before its part of step 5 was copied"
    assert left_over(tmp_path) == [] and not (tmp_path / "latest").exists()


def test_a_node_that_is_gone_is_given_up_when_the_ranks_say_so(nodes: list[NodeRank], tmp_path: Path) -> None:
    _begin(nodes, "0b1", 5)
    nodes[0].take("0b1", 5)
    nodes[0].tell("abandon", "0b1", reason="the agent of n2 has ended")
    assert nodes[0].wait("0b1", commit=True)["failed"] == "the agent of n2 has ended"
    assert left_over(tmp_path) == []


def test_messages_that_make_no_sense_are_answered(agent: ServedAgent, tmp_path: Path) -> None:
    connection = agent.connect()
    for message, error in [
        ({"say": "checkpoint.begin", "token": "0", "step": 1}, "checkpoint.open comes first"),
        ({"say": "checkpoint.outcome", "session": "x", "token": "0", "commit": True}, "the message has no 'x'"),
    ]:
        assert connection.ask(message)[0]["error"] == error
    rank = NodeRank(agent, tmp_path, 0, 1)
    assert rank.tell("take", "0c")["error"] == "the node agent knows of no save 0c"
    assert rank.tell("nonsense", "0c")["error"] == "unknown message checkpoint.nonsense"
    again = NodeRank(agent, tmp_path, 0, 1)
    assert again.opened["error"] == "rank 0 has come already, or not with its memory"


def test_a_node_need_not_wait_for_the_folder_of_a_save(nodes: list[NodeRank], tmp_path: Path) -> None:
    """The node of rank 0 may remove what earlier attempts left for longer than anybody has patience."""
    _begin(nodes, "0b1", 5)
    nodes[1].take("0b1", 5)
    assert nodes[1].wait("0b1", commit=True, limit_s=20.0)["failed"] is None
    nodes[0].take("0b1", 5)
    assert nodes[0].wait("0b1", commit=True)["failed"] is None
    check_step(tmp_path, 5, 2)


class _DawdlingCondition(threading.Condition):
    """A lock behind which a writing thread dawdles, so that all others come before it has gone on."""

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        if threading.current_thread().name.startswith("checkpoint "):
            time.sleep(0.2)


def test_a_node_that_has_told_its_end_takes_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SimpleNamespace(Condition=_DawdlingCondition, Thread=threading.Thread)
    monkeypatch.setattr(node_session, "threading", slow)
    with served([CheckpointService(lambda text: None)]) as agent:
        other = NodeRank(agent, tmp_path, 1, 2, count=1, node_rank=1, num_nodes=2)
        _begin([other], "0a1", 7)
        other.take("0a1", 7)
        assert other.wait("0a1", commit=False)["failed"] is None
        _begin([other], "0a2", 8)


def test_a_node_whose_record_fails_half_way_still_tells_that_it_failed(
    nodes: list[NodeRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename
    failed: list[str] = []

    def rename(source: str, target: str) -> None:
        if target.endswith("node-1.json") and not failed:
            failed.append(target)
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(local_store.os, "rename", rename)
    _begin(nodes, "0b1", 5)
    for rank in nodes:
        rank.take("0b1", 5)
    assert "node 1: cannot rename" in nodes[0].wait("0b1", commit=True)["failed"]
    assert failed


def test_what_fails_behind_the_commit_is_told_and_the_save_stands(
    agent: ServedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also lines to a standard output that nobody reads any more, since srun was killed."""

    def closed(text: str) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def refused(root: Location, name: str) -> None:
        raise StoreError("the quota is used up")

    def gone(path: Location) -> None:
        assert is_heard.wait(20), "ranks hear of a commit when older checkpoints are removed"
        raise FileNotFoundError(errno.ENOENT, "somebody was quicker", str(path))

    is_heard = threading.Event()

    monkeypatch.setattr(folder, "say", closed)
    monkeypatch.setattr(folder, "warn", closed)
    monkeypatch.setattr(folder, "write_latest", refused)
    monkeypatch.setattr(folder, "remove_checkpoint", gone)
    (tmp_path / ".step_0000001.tmp-0123").mkdir()
    (rank,) = [NodeRank(agent, tmp_path, 0, 1, keep=1)]
    for step in (7, 8):
        _begin([rank], f"0a{step}", step)
        rank.take(f"0a{step}", step)
        assert rank.wait(f"0a{step}", commit=True)["failed"] is None
        check_step(tmp_path, step, 1)
    assert left_over(tmp_path) == []
    is_heard.set()
    _eventually(lambda: any("old checkpoints are left" in line for line in agent.log))
    log = "\n".join(agent.log)
    assert "is saved, but" in log and "the quota is used up" in log and "somebody was quicker" in log


def test_a_copy_that_waits_behind_the_removal_of_older_checkpoints_makes_way_for_a_save_to_the_store(
    agent: ServedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(node_save, "thin_out", lambda *told: is_over.wait(20))
    (rank,) = [NodeRank(agent, tmp_path, 0, 1, keep=1)]
    _begin([rank], "0a1", 7)
    rank.take("0a1", 7)
    assert rank.wait("0a1", commit=True)["failed"] is None
    _begin([rank], "0a2", 8)
    rank.take("0a2", 8, is_for_store=False, copy={"keep": [], "store_step": 7})
    _begin([rank], "0a3", 9)
    rank.begin("0a3", 9, is_sure=True)
    assert rank.outcome("0a2", commit=True)["is_known"], "who waits for the copy goes on"
    rank.take("0a3", 9)
    is_over.set()
    assert rank.wait("0a3", commit=True)["failed"] is None
    check_step(tmp_path, 9, 1)


class _Panic(BaseException):
    """As clients in Rust raise it."""


@pytest.mark.parametrize(
    ("module", "place"), [(node_save, "write_first_node"), (parts, "write_boxes"), (node_save, "give_up")]
)
def test_a_client_that_panics_fails_the_save_and_the_next_one_is_taken(
    agent: ServedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, place: str
) -> None:
    def panic(*args: Any) -> None:
        raise _Panic("called `Option::unwrap()` on a `None` value")

    (rank,) = [NodeRank(agent, tmp_path, 0, 1)]
    with monkeypatch.context() as patched:
        patched.setattr(module, place, panic)
        if place == "give_up":
            patched.setattr(node_save, "write_first_node", panic)
        _begin([rank], "0a1", 7)
        rank.take("0a1", 7)
        assert "Option::unwrap" in rank.wait("0a1", commit=True, limit_s=20.0)["failed"]
    assert rank.begin("0a2", 8)["busy"] is None
    rank.take("0a2", 8)
    assert rank.wait("0a2", commit=True)["failed"] is None
    check_step(tmp_path, 8, 1)


def test_an_agent_of_an_earlier_start_removes_nothing_of_the_next_one(agent: ServedAgent, tmp_path: Path) -> None:
    (rank,) = [NodeRank(agent, tmp_path, 0, 1, attempt="first")]
    begin_attempt(locate(tmp_path), "second")
    (tmp_path / ".step_0000009.tmp-0123").mkdir()
    _begin([rank], "0a1", 7)
    rank.take("0a1", 7)
    assert "another start of the run writes to" in rank.wait("0a1", commit=True)["failed"]
    assert left_over(tmp_path) == [".step_0000009.tmp-0123"]
    assert not (tmp_path / "step_0000007").exists()


def test_an_agent_that_has_committed_removes_no_older_ones_when_the_next_start_has_begun(
    agent: ServedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, remove = locate(tmp_path), folder.remove_checkpoint

    def remove_last(path: Location) -> None:
        remove(path)
        begin_attempt(root, "second")

    begin_attempt(root, "first")
    (rank,) = [NodeRank(agent, tmp_path, 0, 1, attempt="first")]
    for step in (1, 2, 3, 4):
        _begin([rank], f"0a{step}", step)
        rank.take(f"0a{step}", step)
        assert rank.wait(f"0a{step}", commit=True)["failed"] is None
    monkeypatch.setattr(folder, "remove_checkpoint", remove_last)
    target, said = node_save.Target(root, 1, None, None, "first", 0, 1), list[str]()
    for _ in range(2):
        node_save.thin_out(target, 4, said.append, lambda: False)
        assert sorted(path.name for path in tmp_path.glob("step_*")) == [f"step_000000{step}" for step in (1, 2, 4)]
    assert all("another start of the run" in line for line in said) and len(said) == 2


def test_an_agent_of_an_earlier_start_commits_nothing(nodes: list[NodeRank], tmp_path: Path) -> None:
    begin_attempt(locate(tmp_path), "first")
    _begin(nodes, "0b1", 5)
    nodes[0].take("0b1", 5)
    assert nodes[0].wait("0b1", commit=False)["failed"] is None
    begin_attempt(locate(tmp_path), "second")
    nodes[1].take("0b1", 5)
    assert "another start of the run writes to" in nodes[0].wait("0b1", commit=True)["failed"]
    assert [path.name for path in tmp_path.iterdir()] == ["attempt"]


def test_an_agent_that_does_not_see_what_rank_0_put_into_the_store_is_not_used(
    agent: ServedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks in a container may see another disk under the same path than the agent outside of it."""
    monkeypatch.setattr(node_save, "wait_for_file", partial(wait_for_file, patience_s=0.1))
    hidden = NodeRank(agent, tmp_path, 0, 1, session="0a", trial=".trial.tmp-0a")
    assert f"{tmp_path}/.trial.tmp-0a, made by rank 0, is not visible here" in hidden.opened["error"]
    (tmp_path / ".trial.tmp-0b").write_text("")
    assert NodeRank(agent, tmp_path, 0, 1, session="0b", trial=".trial.tmp-0b").opened == {"ok": True}


def test_an_agent_does_not_go_on_looking_for_what_ranks_that_have_gone_took_along(tmp_path: Path) -> None:
    """Else it ends half a minute after them."""
    said: list[str] = []
    target = {"root": str(tmp_path), "keep": 0, "bytes_per_s": None, "note_dir": None, "attempt": "first"}
    message = {"target": target, "trial": ".gone", "finish_s": 5.0, "count": 1, "node_rank": 0, "num_nodes": 1}
    node_session.Session("0a", message, said.append, None).close()
    assert said == []


def test_a_last_save_lifts_the_rate_of_the_one_before_and_has_none(agent: ServedAgent, tmp_path: Path) -> None:
    ranks = _two(agent, tmp_path, num_bytes=1000, bytes_per_s=0.01)  # 1000 bytes would take a day
    _begin(ranks, "0a1", 7)
    for rank in ranks:
        rank.take("0a1", 7)
    assert ranks[0].begin("0a2", 8, hurry=True)["busy"]["step"] == 7
    assert ranks[0].wait("0a1", commit=True)["failed"] is None
    for rank in ranks:
        assert rank.begin("0a3", 8, hurry=True)["busy"] is None
    for rank in ranks:
        rank.take("0a3", 8)
    assert ranks[0].wait("0a3", commit=True)["failed"] is None
    check_step(tmp_path, 8, 2)


@pytest.mark.parametrize("hurry", ["from the start", "when it waits", "never"])
def test_a_save_in_a_hurry_waits_for_one_removal_and_not_for_all(
    agent: ServedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hurry: str
) -> None:
    def save(rank: NodeRank, step: int) -> None:
        rank.take(f"0a{step}", step)
        assert rank.wait(f"0a{step}", commit=True)["failed"] is None

    before = NodeRank(agent, tmp_path, 0, 1, session="before", keep=0)
    for step in (5, 6):
        _begin([before], f"0a{step}", step)
        save(before, step)
    is_begun, removed, remove = threading.Event(), [], folder.remove_checkpoint

    def remove_late(path: Location) -> None:
        assert is_begun.wait(20)
        removed.append((path.name, (tmp_path / "step_0000008").exists()))
        remove(path)

    monkeypatch.setattr(folder, "remove_checkpoint", remove_late)
    rank = NodeRank(agent, tmp_path, 0, 1, session="now", keep=1)
    _begin([rank], "0a7", 7)
    save(rank, 7)
    assert rank.begin("0a8", 8, hurry=hurry == "from the start")["busy"] is None
    rank.take("0a8", 8)
    if hurry == "when it waits":
        assert rank.begin("0a9", 9, hurry=True)["busy"]["step"] == 8
    is_begun.set()
    assert rank.wait("0a8", commit=True)["failed"] is None
    _eventually(lambda: len(removed) == 3)
    if hurry != "never":
        assert removed == [("step_0000006", False), ("step_0000007", True), ("step_0000005", True)]
    else:
        assert removed == [("step_0000006", False), ("step_0000005", False), ("step_0000007", True)]


def test_a_save_that_waits_behind_removals_is_seen_to_get_on_with_each(
    agent: ServedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else ranks take a slow store that works for one that does not answer."""
    is_asked, is_seen = threading.Event(), threading.Event()

    def thin_out(target: node_save.Target, *told: Any) -> None:
        assert is_asked.wait(20)
        (target.root / "old").remove()
        assert is_seen.wait(20)

    monkeypatch.setattr(node_save, "thin_out", thin_out)
    (rank,) = [NodeRank(agent, tmp_path, 0, 1, keep=1)]
    _begin([rank], "0a7", 7)
    rank.take("0a7", 7)
    assert rank.wait("0a7", commit=True)["failed"] is None
    _begin([rank], "0a8", 8)
    rank.take("0a8", 8)
    before = rank.outcome("0a8", commit=False)["moved"]
    assert rank.outcome("0a8", commit=False)["moved"] == before
    is_asked.set()
    _eventually(lambda: rank.outcome("0a8", commit=False)["moved"] != before)
    is_seen.set()
    assert rank.wait("0a8", commit=True)["failed"] is None


def test_memory_that_cannot_be_mapped_is_refused_and_given_back(
    agent: ServedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unmapped(segment: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(node_writer.Segment, "map", unmapped)
    before = descriptors_of("self", "test.")
    rank = NodeRank(agent, tmp_path, 0, 1)
    assert "the ranks' memory cannot be mapped" in rank.opened["error"]
    assert descriptors_of("self", "test.") == before + 2, "the rank's own, of its memory and of the index"

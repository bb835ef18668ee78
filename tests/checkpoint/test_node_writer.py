"""The node agent's writing: what was handed over is committed whatever becomes of ranks, and nothing else is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hpc_train.checkpoint.node_writer import CheckpointService
from tests.agents import ServedAgent, served
from tests.checkpoint.node_ranks import NodeRank, check_step, left_over, told


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
    deadline = time.monotonic() + 20
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
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step_0000002", "step_0000003"]


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
    assert "cannot make the folder" in failed and str(tmp_path / "file") in failed
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
        ({"say": "checkpoint.wait", "session": "x", "token": "0", "commit": True}, "the message has no 'x'"),
    ]:
        assert connection.ask(message)[0]["error"] == error
    rank = NodeRank(agent, tmp_path, 0, 1)
    assert rank.tell("take", "0c")["error"] == "the node agent knows of no save 0c"
    assert rank.tell("nonsense", "0c")["error"] == "unknown message checkpoint.nonsense"
    again = NodeRank(agent, tmp_path, 0, 1)
    assert again.opened["error"] == "rank 0 has come already, or not with its memory"

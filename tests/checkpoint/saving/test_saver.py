"""Who saves: node agents from a copy, beside what goes on; the ranks by themselves where there are none or they end."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.checkpoint.folders.folder import steps_newest_first
from hpc_train.checkpoint.folders.verify import verify
from hpc_train.checkpoint.format.state import StatePiece
from hpc_train.checkpoint.saving import agent_link, agent_saves, node_save, snapshot
from hpc_train.checkpoint.saving import saver as saver_module
from hpc_train.checkpoint.saving.node_writer import CheckpointService
from hpc_train.checkpoint.saving.saver import Saver
from hpc_train.checkpoint.stores.location import locate
from hpc_train.cluster.agent_service import Peer
from hpc_train.config import CheckpointConfig
from hpc_train.errors import CheckpointError, ConfigError, HpcTrainError
from tests.agents import NODE
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.checkpoint.thread_ranks import agents, end_agent
from tests.ranks import TestRank, run_ranks
from tests.worlds import make_world

ELEMENTS = 1 << 16


class _Rank:
    """A rank with a state that is changed in place, as training does."""

    def __init__(self, me: TestRank, root: str, key: str | None, *, nodes: int = 1, **config: Any) -> None:
        self._me = me
        self.state: list[StatePiece] = plain_state.state(me, None, ELEMENTS)
        self.durations: list[float] = []
        self.said: list[str] = []
        saver_module.say = saver_module.warn = self.said.append  # type: ignore[assignment]
        agent_saves.say = agent_saves.warn = agent_link.warn = self.said.append  # type: ignore[assignment]
        world, node = make_world(me), NODE
        if nodes > 1:
            node = f"n{me.rank + 1}"
            world = replace(world, node=node, node_rank=me.rank, num_nodes=nodes, local_rank=0, local_world_size=1)
        agent = None if key is None else (key, node)
        root_place, run_dir = locate(root), Path(root).parent
        self.saver = Saver(CheckpointConfig(**config), root_place, run_dir, world, agent, self._note)

    def _note(self, seconds: float) -> None:
        self.durations.append(seconds)

    def train_to(self, step: int) -> None:
        for piece, wanted in zip(self.state, plain_state.state(self._me, step, ELEMENTS), strict=True):
            piece.data.copy_(wanted.data)

    def save(self, step: int, *, must_last: bool = False) -> bool:
        self.train_to(step)
        return self.saver.save(step, self.state, {"num_updates": step}, must_last=must_last)


def _save_in_turn(me: TestRank, root: str, key: str | None, nodes: int) -> tuple[list[bool], int]:
    rank = _Rank(me, root, key, nodes=nodes, keep=3)
    answers = [rank.save(1)]
    rank.train_to(77)  # what comes after the copy is not saved
    answers += [rank.save(step) for step in (2, 3)]
    rank.train_to(78)
    answers.append(rank.save(4, must_last=True))
    newest = next(step for step, _ in steps_newest_first(locate(root)))
    answers.append(rank.save(5))
    rank.saver.finish()
    assert len(rank.durations) == (5 if me.rank == 0 else 0)
    return answers, newest


def _in_root(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _bytes_of(folder: Path) -> dict[str, bytes]:
    """All files but torch's index, in which torch puts a random word."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".metadata"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # said by torch when it reads on one process
@pytest.mark.parametrize("nodes", [1, 2])
def test_agents_write_what_was_there_when_it_was_copied_to_the_same_bytes_as_ranks(tmp_path: Path, nodes: int) -> None:
    import torch.distributed.checkpoint as dcp

    root = tmp_path / "by agents"
    with agents(2) as key:
        assert run_ranks(_save_in_turn, 2, str(root), key, nodes) == [([True] * 5, 4)] * 2
    assert _in_root(root) == ["latest", "step_0000003", "step_0000004", "step_0000005"]
    assert plain_state.load(Alone(), root, ELEMENTS) == 5
    alone = tmp_path / "by ranks"
    run_ranks(_save_in_turn, 2, str(alone), None, 1)
    assert _in_root(root) == _in_root(alone)
    for step in (3, 4, 5):
        name = f"step_000000{step}"
        assert list(verify(locate(root / name))) == []
        assert _bytes_of(root / name) == _bytes_of(alone / name)
    wanted = {piece.name: piece.tensor() for piece in plain_state.state(Alone(), 5, ELEMENTS)}  # type: ignore[arg-type]
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(found, checkpoint_id=root / "step_0000005", no_dist=True)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def _save_while_busy(me: TestRank, root: str, key: str, when_busy: str) -> tuple[list[bool], list[str]]:
    rank = _Rank(me, root, key, when_busy=when_busy)
    answers = [rank.save(1)]
    answers.append(rank.save(2))
    rank.saver.finish()
    return answers, rank.said


def _write_step_1_when_both_ranks_have_waited(monkeypatch: pytest.MonkeyPatch, wait_s: float) -> None:
    """Ranks that wait for a save ask what has become of it without a commit."""
    waiting, all_wait = set[int](), threading.Event()
    real_answer, real_write = CheckpointService.answer, node_save.write_first_node

    def answer(service: CheckpointService, peer: Peer, message: Mapping[str, Any], descriptors: Sequence[int]) -> Any:
        if message["say"] == "checkpoint.outcome" and not message["commit"]:
            waiting.add(peer.pid)
            if len(waiting) == 2:
                all_wait.set()
        return real_answer(service, peer, message, descriptors)

    def write(target: Any, step: int, *further: Any) -> Any:
        if step == 1:
            assert all_wait.wait(60)
            time.sleep(wait_s)
        return real_write(target, step, *further)

    monkeypatch.setattr(CheckpointService, "answer", answer)
    monkeypatch.setattr(node_save, "write_first_node", write)


@pytest.mark.parametrize(("when_busy", "steps"), [("wait", [2, 1]), ("skip", [1])])
def test_a_save_that_is_due_while_one_is_written_waits_or_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_busy: str, steps: list[int]
) -> None:
    _write_step_1_when_both_ranks_have_waited(monkeypatch, 0.6)
    with agents(1) as key:
        found = run_ranks(_save_while_busy, 2, str(tmp_path / "root"), key, when_busy)
    assert [answers for answers, _ in found] == [[True, len(steps) == 2]] * 2
    assert [step for step, _ in steps_newest_first(locate(tmp_path / "root"))] == steps
    assert plain_state.load(Alone(), tmp_path / "root", ELEMENTS) == steps[0]
    said = "\n".join(found[0][1])
    action = "it is waited for" if when_busy == "wait" else r"this one is left out (checkpoint.when_busy=skip)"
    assert "step 2: the save of step 1 is not done, " in said and action in said
    times = re.search(r"saved step_0000001 in ([\d.]+) s(?:, of which training waited ([\d.]+) s)?", said)
    assert times is not None
    copied = re.search(r"step 1 is copied in ([\d.]+) s", said)
    assert copied is not None
    assert float(times[2] or times[1]) - float(copied[1]) > 0.5, said  # by the next save, or at the end


def _end_agent(me: TestRank, key: str, node: str) -> None:
    if me.rank == 0:
        end_agent(key, node)
    make_world(me).control.barrier()


def _save_around_an_end(me: TestRank, root: str, key: str, nodes: int, must_last: bool) -> tuple[list[bool], list[str]]:
    rank = _Rank(me, root, key, nodes=nodes)
    answers = [rank.save(1, must_last=True)]
    _end_agent(me, key, f"n{nodes}")
    answers += [rank.save(step, must_last=must_last) for step in (2, 3)]
    rank.saver.finish()
    return answers, rank.said


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("must_last", [False, True])
def test_ranks_save_by_themselves_when_the_agent_of_any_node_has_ended(
    tmp_path: Path, nodes: int, must_last: bool
) -> None:
    with agents(nodes) as key:
        found = run_ranks(_save_around_an_end, 2, str(tmp_path / "root"), key, nodes, must_last)
    assert [answers for answers, _ in found] == [[True, True, True]] * 2
    assert plain_state.load(Alone(), tmp_path / "root", ELEMENTS) == 3
    (warning,) = [text for text in found[0][1] if "from here on the ranks write checkpoints by themselves" in text]
    assert f"(on n{nodes})" in warning
    assert not any("by themselves" in text for text in found[1][1])


def _save_where_it_fails(me: TestRank, root: str, key: str, on_error: str) -> tuple[list[Any], bool, list[str]]:
    rank = _Rank(me, root, key, on_error=on_error)
    rank.saver.open(rank.state)
    if me.rank == 0:
        Path(root).rmdir()
        Path(root).write_text("not a folder any more")
    make_world(me).control.barrier()
    answers: list[Any] = [rank.save(1)]
    while me.rank == 0 and not any("was not saved" in text for text in rank.said):
        rank.saver.look()
        time.sleep(0.01)
    has_failed = rank.saver.has_failed
    for act in (lambda: rank.save(2), lambda: rank.save(3, must_last=True), lambda: rank.saver.finish()):
        try:
            answers.append(act())
        except CheckpointError as error:
            answers.append(f"{error} | printed by {error.reporter}")
    return answers, has_failed, rank.said


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_save_that_fails_beside_the_training_is_told_at_once_and_raised_alike_by_the_next(
    tmp_path: Path, on_error: str
) -> None:
    with agents(1) as key:
        found = run_ranks(_save_where_it_fails, 2, str(tmp_path / "root"), key, on_error)
    assert [has_failed for _, has_failed, _ in found] == [on_error == "stop", False]
    for answers, _, _ in found:
        assert answers[0] is True
        if on_error == "stop":
            assert "step 1 was not saved: cannot " in answers[1] and "printed by 0" in answers[1]
            assert "step 3 was not saved" in answers[2]  # 2 was not begun
        else:
            assert answers[1:3] == [True, False]
        last = "all steps are taken, but the last save failed"
        assert (
            last in answers[3]
            and "printed by 0" in answers[3]
            and "; the last that failed is that of step 3: cannot " in answers[3]
        )
    warned = [text for text in found[0][2] if "was not saved" in text]
    assert len(warned) == (1 if on_error == "stop" else 3)


def _open_without(me: TestRank, root: str, key: str | None, writer: str, what: str) -> tuple[Any, list[str]]:
    if what == "memory" and me.rank == 1:
        snapshot.Segment.create = _no_memory  # type: ignore[method-assign]
    agent_link.PATIENCE_S = 0.2
    rank = _Rank(me, root, key, writer=writer)
    try:
        return rank.save(1), rank.said
    except HpcTrainError as error:
        return f"{type(error).__name__}: {error}", rank.said


def _no_memory(label: str, num_bytes: int) -> Any:
    raise HpcTrainError(f"{num_bytes} bytes of memory for {label} are not to be had")


@pytest.mark.parametrize(
    ("what", "why"),
    [("agent", "no node agent answers on n1"), ("memory", "memory for checkpoint.rank_1 are not to be")],
)
def test_without_agent_or_memory_ranks_save_by_themselves_or_refuse(tmp_path: Path, what: str, why: str) -> None:
    with agents(1) as key:
        used = key if what == "memory" else "no such key"
        found = run_ranks(_open_without, 2, str(tmp_path / "root"), used, "auto", what)
        assert [answer for answer, _ in found] == [True, True]
        assert sum(why in text and "by themselves" in text for text in found[0][1]) == 1
        for answer, _ in run_ranks(_open_without, 2, str(tmp_path / "other"), used, "agent", what):
            assert answer.startswith("CheckpointError: checkpoint.writer=agent, but ") and why in answer
    assert plain_state.load(Alone(), tmp_path / "root", ELEMENTS) == 1


def test_an_agent_that_is_asked_for_where_no_driver_started_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.writer=agent, but no driver has started a node agent here"):
        _Rank(Alone(), str(tmp_path), None, writer="agent").save(1)  # type: ignore[arg-type]

"""Saves by agents where something goes wrong: all ranks go on alike, nobody waits for ever, nothing is left behind."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint.files.write import Flow
from hpc_train.checkpoint.folders.attempt import attempt_of, begin_attempt, require_agents, require_attempt
from hpc_train.checkpoint.folders.folder import steps_newest_first
from hpc_train.checkpoint.saving import agent_link, agent_saves, node_save, node_writer, shared_memory, snapshot
from hpc_train.checkpoint.saving import saver as saver_module
from hpc_train.checkpoint.saving.node_writer import CheckpointService
from hpc_train.checkpoint.saving.saver import Saver
from hpc_train.checkpoint.saving.snapshot import Snapshot
from hpc_train.checkpoint.stores.cause import StoreError
from hpc_train.checkpoint.stores.location import locate
from hpc_train.cluster import agent_wait
from hpc_train.cluster.agent_service import Peer
from hpc_train.cluster.agent_wait import AgentLimits
from hpc_train.errors import CheckpointError, HpcTrainError
from tests.checkpoint import plain_state
from tests.checkpoint.plain_state import Alone
from tests.checkpoint.thread_ranks import ELEMENTS, ThreadRank, agents, end_agent, run_threads
from tests.cluster.test_memory_segment import descriptors_of

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def said(monkeypatch: Patch) -> list[str]:
    lines: list[str] = []
    for module in (saver_module, agent_saves):
        monkeypatch.setattr(module, "say", lines.append)
        monkeypatch.setattr(module, "warn", lines.append)
    monkeypatch.setattr(agent_link, "warn", lines.append)
    return lines


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """What a patched agent waits for; set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def _steps(root: Path) -> list[int]:
    return [step for step, _ in steps_newest_first(locate(root))]


def _wait_for_end(saver: Saver) -> None:
    """Until this rank's agent is done with the save that is on its way."""
    saves = saver._agents
    assert saves is not None and saves._pending is not None
    saves._outcome(saves._pending, commit=True)


def refuse_node_1(monkeypatch: Patch, wait: Callable[[Flow], object]) -> None:
    """At step 1 the store refuses node 1, and node 2 waits before it writes."""
    real = node_save.write_node

    def write_node(target: Any, step: int, token: str, parts: Any, flow: Flow, log: Any) -> Any:
        if step == 1 and target.node_rank == 1:
            raise StoreError("the store refuses node 1")
        if step == 1:
            wait(flow)
        return real(target, step, token, parts, flow, log)

    monkeypatch.setattr(node_save, "write_node", write_node)


def test_a_save_that_one_node_fails_while_another_still_writes_is_followed_by_the_next(
    tmp_path: Path, monkeypatch: Patch, said: list[str]
) -> None:
    def until_stopped(flow: Flow) -> None:
        while True:
            flow.check()
            time.sleep(0.01)

    refuse_node_1(monkeypatch, until_stopped)

    def train(rank: ThreadRank) -> list[bool]:
        saver = rank.saver(tmp_path / "root", key, on_error="continue")
        answers = [rank.save(saver, 1)]
        if rank.rank == 1:
            _wait_for_end(saver)
        rank.world.control.barrier()
        answers += [rank.save(saver, 2, must_last=True), rank.save(saver, 3)]
        saver.finish()
        return answers

    with agents(3) as key:
        assert run_threads(train, 3)[0] == [[True] * 3] * 3
    assert _steps(tmp_path / "root") == [3, 2]
    assert sum("step 1 was not saved" in line and "refuses node 1" in line for line in said) == 1
    assert plain_state.load(Alone(), tmp_path / "root", ELEMENTS) == 3


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_a_failed_save_that_is_not_over_everywhere_is_waited_for_or_the_next_one_left_out(
    tmp_path: Path, monkeypatch: Patch, release: threading.Event, when_busy: str
) -> None:
    """A node whose store hangs cannot be hurried, and is not overtaken."""
    refuse_node_1(monkeypatch, lambda flow: release.wait())

    def train(rank: ThreadRank) -> list[bool]:
        saver = rank.saver(tmp_path / "root", key, on_error="continue", when_busy=when_busy)
        answers = [rank.save(saver, 1)]
        if rank.rank == 1:
            _wait_for_end(saver)
        rank.world.control.barrier()
        if when_busy == "wait":
            threading.Timer(0.3, release.set).start()
        answers.append(rank.save(saver, 2))
        release.set()
        answers.append(rank.save(saver, 3, must_last=True))
        return answers

    with agents(3) as key:
        assert run_threads(train, 3)[0] == [[True, when_busy == "wait", True]] * 3
    assert _steps(tmp_path / "root") == ([3, 2] if when_busy == "wait" else [3])


def test_copies_are_stopped_by_a_save_that_is_made_and_by_none_that_is_left_out(
    tmp_path: Path, monkeypatch: Patch, release: threading.Event
) -> None:
    """All agents give them up before any rank's memory changes: else a part would be of two states."""
    refuse_node_1(monkeypatch, lambda flow: release.wait())
    real, sure = CheckpointService.answer, list[int]()
    fill, filled_after = Snapshot.fill, list[int]()

    def answer(service: CheckpointService, peer: Peer, message: Mapping[str, Any], descriptors: Sequence[int]) -> Any:
        if message.get("is_sure"):
            sure.append(int(message["step"]))
        return real(service, peer, message, descriptors)

    def noted_fill(copied: Snapshot, pieces: Any) -> None:
        filled_after.append(len(sure))
        fill(copied, pieces)

    monkeypatch.setattr(CheckpointService, "answer", answer)
    monkeypatch.setattr(Snapshot, "fill", noted_fill)

    def train(rank: ThreadRank) -> list[bool]:
        saver = rank.saver(tmp_path / "root", key, on_error="continue", when_busy="skip")
        saver.open(rank.state)
        assert saver._agents is not None
        saver._agents._copies = _NoCopies()  # type: ignore[assignment]
        answers = [rank.save(saver, 1)]
        if rank.rank == 1:
            _wait_for_end(saver)
        rank.world.control.barrier()
        answers.append(rank.save(saver, 2))
        rank.world.control.barrier()
        release.set()
        return [*answers, rank.save(saver, 3, must_last=True)]

    with agents(3) as key:
        assert run_threads(train, 3)[0] == [[True, False, True]] * 3
    assert sure == [1] * 3 + [3] * 3 and filled_after == [3] * 3 + [6] * 3


class _NoCopies:
    """In place of copies on the nodes' disks, of which nothing is told."""

    def hear(self, answers: Sequence[Mapping[str, Any]]) -> None:
        pass


def test_ranks_write_only_when_the_agent_that_commits_has_ended_with_it(tmp_path: Path, monkeypatch: Patch) -> None:
    committing, given_up, committed = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []
    commit, abandon, by_ranks = node_save.commit, node_writer.Session.abandon, saver_module.save_checkpoint

    def slow_commit(
        target: Any, step: int, token: str, own: Any, values: Any, index: Any, flow: Flow, log: Any, tell: Any
    ) -> None:
        committing.set()
        assert given_up.wait(20)
        time.sleep(0.3)
        commit(target, step, token, own, values, index, Flow(), log, tell)  # it was behind its last look at the flow
        committed.set()
        order.append("committed")

    def noted_abandon(session: Any, token: str, reason: str) -> None:
        abandon(session, token, reason)
        given_up.set()

    def noted_save(*args: Any, **more: Any) -> Any:
        order.append("ranks write")
        return by_ranks(*args, **more)

    monkeypatch.setattr(node_save, "commit", slow_commit)
    monkeypatch.setattr(node_writer.Session, "abandon", noted_abandon)
    monkeypatch.setattr(saver_module, "save_checkpoint", noted_save)

    def train(rank: ThreadRank) -> list[float]:
        saver = rank.saver(tmp_path / "root", key)
        rank.save(saver, 1)
        assert committing.wait(20)
        if rank.rank == 1:
            _wait_for_end(saver)
            end_agent(key, "n2")
        rank.world.control.barrier()
        assert rank.save(saver, 2)
        return rank.durations

    with agents(2) as key:
        (durations, _), _ = run_threads(train, 2)
    assert order == ["committed", "ranks write", "ranks write"]
    assert len(durations) == 2, "both saves are reported"
    assert _steps(tmp_path / "root") == [2, 1]


def hanging_store(monkeypatch: Patch, writes: str, release: threading.Event) -> None:
    """A node's writer that does not come to its end while a test runs, and fails then."""

    def hangs(*args: Any) -> None:
        release.wait()
        raise StoreError("too late")

    monkeypatch.setattr(node_save, writes, hangs)


def save_that_is_lost(rank: ThreadRank, root: Path, key: str, **config: Any) -> Saver:
    """Step 1 is copied, and the agent of n2 ends while it writes it."""
    saver = rank.saver(root, key, finish_s=0.1, **config)
    rank.save(saver, 1)
    if rank.rank == 1:
        end_agent(key, "n2")
    rank.world.control.barrier()
    return saver


@pytest.mark.parametrize("is_told", [False, True])
def test_a_save_that_an_agent_took_along_is_made_good_by_a_step_that_only_had_to_be_copied_locally(
    tmp_path: Path, monkeypatch: Patch, release: threading.Event, said: list[str], is_told: bool
) -> None:
    """checkpoint.local: the next save to the store may be far away. A save that failed before was told of already."""
    hanging_store(monkeypatch, "write_node", release)

    def train(rank: ThreadRank) -> None:
        saver = save_that_is_lost(rank, tmp_path / "root", key, on_error="continue")
        assert saver._agents is not None and saver._agents._pending is not None
        saver._agents._pending.is_raised = is_told
        saver.copy_locally(2, rank.state, {"num_updates": 2})

    with agents(2) as key:
        run_threads(train, 2)
    told = [line for line in said if "step 1, which was being written, may be lost: from here on the ranks" in line]
    assert (len(told), _steps(tmp_path / "root")) == ((0, []) if is_told else (1, [2]))


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_what_an_agent_takes_along_at_the_end_is_not_passed_over(
    tmp_path: Path, monkeypatch: Patch, release: threading.Event, said: list[str], on_error: str
) -> None:
    """checkpoint.at_end=false: the state has changed since it was copied, and nobody else has that copy."""

    hanging_store(monkeypatch, "write_node", release)

    def train(rank: ThreadRank) -> str:
        saver = save_that_is_lost(rank, tmp_path / "root", key, on_error=on_error)
        with pytest.raises(CheckpointError) as raised:
            saver.finish()
        assert raised.value.reporter == 0
        return str(raised.value)

    with agents(2) as key:
        results, _ = run_threads(train, 2)
    of_last = "the last that failed is that of step 1: the node agent"
    words = "step 1 was not saved: the node agent" if on_error == "stop" else of_last
    assert len(results) == 2 and all(words in text and "(on n2)" in text for text in results)
    assert sum("was not saved" in line for line in said) == (on_error == "continue")


def test_a_run_that_stops_for_a_failed_save_says_so_also_when_the_agent_ends(tmp_path: Path) -> None:
    def train(rank: ThreadRank) -> tuple[bool, str]:
        saver = rank.saver(tmp_path / "root", key)
        saver.open(rank.state)
        rank.world.control.barrier()
        if rank.rank == 0:
            (tmp_path / "root").rmdir()
            (tmp_path / "root").write_text("")
        rank.world.control.barrier()
        rank.save(saver, 1)
        while rank.rank == 0 and not saver.has_failed:
            saver.look()
            time.sleep(0.01)
        has_failed = saver.has_failed
        if rank.rank == 0:
            end_agent(key, "n1")
            (tmp_path / "root").unlink()
        rank.world.control.barrier()
        with pytest.raises(CheckpointError) as raised:
            rank.save(saver, 2, must_last=True)
        assert not saver.has_failed
        return has_failed, str(raised.value)

    with agents(1) as key:
        results, _ = run_threads(train, 2, one_node=True)
    assert [has_failed for has_failed, _ in results] == [True, False]
    assert all("step 1 was not saved: cannot " in text for _, text in results)


def test_a_save_is_reported_although_nobody_heard_how_long_it_took(tmp_path: Path, monkeypatch: Patch) -> None:
    def deaf(pending: Any, agent: Any, session: str, silence_s: float) -> None:
        pending._heard = {"gone": "no node agent answers"}

    monkeypatch.setattr(agent_saves.PendingSave, "listen", deaf)

    def train(rank: ThreadRank) -> list[float]:
        saver = rank.saver(tmp_path / "root", key)
        rank.save(saver, 1)
        _wait_for_end(saver)
        rank.save(saver, 2, must_last=True)
        return rank.durations

    with agents(1) as key:
        (durations,), _ = run_threads(train, 1)
    assert len(durations) == 2 and all(0 < seconds < 60 for seconds in durations)


@pytest.mark.parametrize("verb", ["begin", "outcome"])
def test_an_agent_that_is_stopped_does_not_hold_up_training(
    tmp_path: Path, monkeypatch: Patch, said: list[str], release: threading.Event, verb: str
) -> None:
    """As by SIGSTOP or a frozen control group: its connection stays open, and nothing comes."""
    real = CheckpointService.answer

    def answer(service: CheckpointService, peer: Peer, message: Mapping[str, Any], descriptors: Sequence[int]) -> Any:
        return None if message["say"] == f"checkpoint.{verb}" else real(service, peer, message, descriptors)

    monkeypatch.setattr(CheckpointService, "answer", answer)
    hanging_store(monkeypatch, "write_first_node", release)
    (tmp_path / "root").mkdir()
    limits = AgentLimits(silence_s=0.2, data_s=60.0, save_s=60.0)

    def train(rank: ThreadRank) -> bool:
        return rank.save(rank.saver(tmp_path / "root", key, limits=limits, finish_s=0.1), 1, must_last=True)

    with agents(1) as key:
        begin_attempt(locate(tmp_path / "root"), attempt_of(key))
        assert run_threads(train, 2, one_node=True)[0] == [True, True]
    assert sum("node agent of n1 has answered nothing for " in line for line in said) == 1
    assert _steps(tmp_path / "root") == [1]
    with pytest.raises(CheckpointError, match=r"the ranks write to .* by themselves now"):
        # It may wake up at any time, and commits nothing then.
        require_agents(locate(tmp_path / "root"), attempt_of(key))
    require_attempt(locate(tmp_path / "root"), attempt_of(key))


def test_a_store_that_hangs_ends_the_run_on_every_rank_with_the_node_whose_agent_waits_for_it(
    tmp_path: Path, monkeypatch: Patch, said: list[str], release: threading.Event
) -> None:
    """The agent lives and answers; its thread is in a call of the file system that does not come back."""
    hanging_store(monkeypatch, "write_first_node", release)
    monkeypatch.setattr(agent_wait, "_FIRST_WORD_S", 0.2)
    monkeypatch.setattr(agent_wait, "LONGEST_GAP_S", 0.1)  # ten looks at least, so that a word comes before the end
    limits = AgentLimits(silence_s=60.0, data_s=60.0, save_s=1.0)
    found: dict[int, CheckpointError] = {}

    def train(rank: ThreadRank) -> None:
        try:
            rank.save(rank.saver(tmp_path / "root", key, limits=limits, finish_s=0.1), 1, must_last=True)
        except CheckpointError as problem:
            found[rank.rank] = problem

    with agents(1) as key:
        run_threads(train, 2, one_node=True)
        release.set()
    assert {rank: problem.reporter for rank, problem in found.items()} == {0: 0, 1: 0}
    told = "the save of step 1 does not get on: the node agent of n1 lives, but nothing has moved for 1 s (0.0 of "
    assert str(found[0]).startswith(told) and str(found[1]) == str(found[0])
    assert any("for the save of step 1, from the node agent of n1 (0.0 of " in line for line in said), said


def _mapped(label: str) -> int:
    return Path("/proc/self/maps").read_text().count(f"/memfd:hpc_train.{label}")


def _held() -> tuple[int, int]:
    return descriptors_of("self", "checkpoint."), _mapped("checkpoint.")


def _save_once(rank: ThreadRank, root: Path, key: str, **config: Any) -> bool:
    return rank.save(rank.saver(root, key, **config), 1)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE])
def test_memory_that_one_rank_does_not_get_is_done_without_by_all_and_given_back(
    tmp_path: Path, monkeypatch: Patch, said: list[str], number: int
) -> None:
    real = snapshot.Segment.map

    def map_for_rank_0(segment: Any, **more: Any) -> Any:
        if threading.current_thread().name == "rank 1":
            raise OSError(number, "not to be had")
        return real(segment, **more)

    monkeypatch.setattr(snapshot.Segment, "map", map_for_rank_0)
    with agents(1) as key:
        results, _ = run_threads(lambda rank: _save_once(rank, tmp_path / "root", key), 2, one_node=True)
    assert results == [True, True] and _steps(tmp_path / "root") == [1]
    assert sum("not to be had" in line and "by themselves" in line for line in said) == 1
    assert _held() == (0, 0)


def test_an_agent_that_refuses_the_memory_is_done_without_and_the_memory_given_back(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    def refuse(session: Any, peer: Any, message: Mapping[str, Any], memories: Any) -> None:
        raise ValueError("not this one")

    monkeypatch.setattr(node_writer.Session, "join", refuse)
    with agents(2) as key:
        results, _ = run_threads(lambda rank: _save_once(rank, tmp_path / "root", key), 2)
    assert results == [True, True] and _held() == (0, 0)


def test_the_memory_is_given_back_when_an_agent_has_ended(tmp_path: Path) -> None:
    def train(rank: ThreadRank) -> bool:
        saver = rank.saver(tmp_path / "root", key)
        rank.save(saver, 1, must_last=True)
        if rank.rank == 0:
            end_agent(key, "n1")
        rank.world.control.barrier()
        assert rank.save(saver, 2)
        # The agents are threads of this process: what is mapped still is the other one's.
        rank.world.control.barrier()
        return descriptors_of("self", "checkpoint.") == 0

    with agents(2) as key:
        assert run_threads(train, 2)[0] == [True, True]
    assert _held() == (0, 0)


def test_the_copies_of_all_ranks_of_a_node_must_fit_into_its_memory(
    tmp_path: Path, monkeypatch: Patch, said: list[str]
) -> None:
    one = snapshot.snapshot_bytes(plain_state.state(Alone(), None, ELEMENTS), 0) // 2  # type: ignore[arg-type]
    monkeypatch.setattr(shared_memory, "available_memory_bytes", lambda: one + one // 2)

    def train(rank: ThreadRank) -> bool:
        return _save_once(rank, tmp_path / f"root{rank.world.num_nodes}", key)

    with agents(2) as key:
        assert run_threads(train, 2)[0] == [True, True]
        assert not any("by themselves" in line for line in said), "each node has room for one"
        assert run_threads(train, 2, one_node=True)[0] == [True, True]
    (warning,) = [line for line in said if "by themselves" in line]
    assert "for the copies of the 2 ranks of n1 are not to be had" in warning


def test_agents_that_look_at_another_store_than_the_ranks_are_done_without(
    tmp_path: Path, monkeypatch: Patch, said: list[str]
) -> None:
    def look(target: Any, name: str, is_wanted: Any) -> None:
        assert (target.root / name).is_file(), "rank 0 has put it there"
        if target.node_rank == 1:
            raise CheckpointError("not visible here")

    monkeypatch.setattr(node_save, "look_for_trial", look)
    with agents(2) as key:
        results, _ = run_threads(lambda rank: _save_once(rank, tmp_path / "root", key), 2)
    assert results == [True, True]
    assert sum("the node agent of n2 does not take the state: not visible here" in line for line in said) == 1
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["latest", "step_0000001"]


def test_what_all_ranks_have_is_told_to_rank_0_alone(tmp_path: Path) -> None:
    """At 12,288 ranks the layout of all files is 200 MB, which each of a node's ranks would hold."""
    with agents(1) as key:
        _, longest = run_threads(lambda rank: _save_once(rank, tmp_path / "root", key), 2, one_node=True)
        _, by_ranks = run_threads(lambda rank: _save_once(rank, tmp_path / "other", key, writer="rank"), 2)
    assert max(longest, by_ranks) < 200, "the two boxes of a rank are 400 bytes long"


class _FakeCuda:
    """CUDA's pinning, which refuses on demand."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.pinned: list[int] = []
        self.was_mapped: list[bool] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if self.code == 0:
            self.pinned.append(address)
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.was_mapped.append(_mapped("checkpoint.rank_7") == 1)
        self.pinned.remove(address)
        return 0


@pytest.mark.parametrize("code", [0, 2])
def test_pinned_memory_is_released_before_it_is_unmapped(monkeypatch: Patch, code: int) -> None:
    cuda = _FakeCuda(code)
    monkeypatch.setattr(snapshot, "gpus_of", lambda pieces: {"cuda:0"})
    monkeypatch.setattr(snapshot.torch.cuda, "cudart", lambda: cuda)
    state = plain_state.state(Alone(), None, ELEMENTS)  # type: ignore[arg-type]
    if code:
        with pytest.raises(HpcTrainError, match="cannot be pinned"):
            Snapshot(state, 7)
    else:
        copied = Snapshot(state, 7)
        assert len(cuda.pinned) == 1
        copied.close()
        copied.close()
        assert cuda.was_mapped == [True]
    assert cuda.pinned == [] and _mapped("checkpoint.rank_7") == 0 and descriptors_of("self", "checkpoint.rank_7") == 0

"""What the loop takes: a step ahead in a thread, the position of what was taken, who reads when an agent is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_train.cluster import agent_wait
from hpc_train.cluster.agent_address import AgentGone, make_job_key
from hpc_train.cluster.agent_wait import AgentLimits
from hpc_train.data import feed as feed_module
from hpc_train.data import node_reader
from hpc_train.data.agent_batches import AgentAddress, ReadingPlace
from hpc_train.data.batch_source import BatchSource, HeldoutPart, OwnBatches, Taken
from hpc_train.data.feed import Feed, open_feed
from hpc_train.data.loader import Loader
from hpc_train.data.node_reader import DataService
from hpc_train.errors import ConfigError, DataError
from tests.agents import NODE, served
from tests.data.corpora import VOCAB, configs, numbered, values, write

ONLY = ReadingPlace(dp=1, dp_rank=0, wants_tokens=True, local_rank=0, local_world_size=1)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write(tmp_path / "set", numbered(list(range(1, 30))))


def expected_of(prefix: str, steps: int, **data: Any) -> list[tuple[list[Any], dict[str, Any]]]:
    """Batches and position of each step, read plainly."""
    own = OwnBatches(Loader(*configs([prefix], steps=steps, **data), vocab_size=VOCAB, dp=1), 0)
    taken = [own.step(number) for number in range(1, steps + 1)]
    return [([values(batch) for batch in one.batches], one.state) for one in taken]


def take(feed: Feed, number: int) -> tuple[list[Any], dict[str, Any]]:
    return [values(batch) for batch in feed.micro_batches(number)], feed.state()


def heldout_of(feed: Feed) -> list[list[Any]]:
    return [[values(batch) for batch in part.batches] for part in feed.heldout()]


class Slow(BatchSource):
    """Says when it is asked, and waits to be told to go on."""

    has_heldout, reader = False, "a test"

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.go = threading.Semaphore(0)

    def first_state(self) -> dict[str, Any]:
        return {"at": 0}

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        return []

    def step(self, number: int) -> Taken:
        self.asked.append(number)
        assert self.go.acquire(timeout=10)
        return Taken([], {"at": number})

    def begin_evaluation(self) -> None: ...

    def heldout_step(self, number: int) -> HeldoutPart | None:
        return None

    def close(self) -> None:
        self.go.release()


def test_the_next_step_is_made_ready_while_one_runs_and_the_position_is_that_of_the_last_one_taken() -> None:
    source = Slow()
    feed = Feed(source, last_step=3)
    assert feed.state() == {"at": 0}
    source.go.release(2)
    for number in (1, 2):
        assert list(feed.micro_batches(number)) == []
        deadline = time.monotonic() + 10
        while source.asked != list(range(1, number + 2)):  # it is asked for while this step "runs"
            assert time.monotonic() < deadline, source.asked
            time.sleep(0.001)
        time.sleep(0.02)
        assert feed.state() == {"at": number}
        if number == 1:
            source.go.release()
    assert list(feed.micro_batches(3)) == []
    time.sleep(0.05)
    assert source.asked == [1, 2, 3]  # nothing behind the last step
    feed.close()


@pytest.mark.parametrize("reader", ["rank", "auto"])
def test_both_readers_give_the_same_steps_and_positions(
    prefix: str, reader: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = expected_of(prefix, 5, heldout_fraction=0.2)
    data, train = configs([prefix], steps=5, heldout_fraction=0.2, reader=reader)
    with served([DataService(lambda line: None)]) as agent:
        address = AgentAddress(agent.key, NODE, "s")
        feed = open_feed(data, train, vocab_size=VOCAB, place=ONLY, agent=address, is_first=True)
        assert [take(feed, number) for number in range(1, 4)] == expected[:3]
        evaluations = [heldout_of(feed) for _ in range(2)]
        assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 2
        assert [take(feed, number) for number in (4, 5)] == expected[3:]
        feed.close()
    said = capsys.readouterr().out
    assert ("each rank reads by itself" if reader == "rank" else "read once a node by its agent") in said
    assert f"data.reader={reader}" in said


@pytest.mark.parametrize("at", [0, 1, 3])
def test_when_the_agent_ends_the_ranks_of_its_node_go_on_by_themselves_with_the_same_steps(
    prefix: str, at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = expected_of(prefix, 6, heldout_fraction=0.2)
    data, train = configs([prefix], steps=6, heldout_fraction=0.2)
    with served([DataService(lambda line: None)]) as agent:
        feed = open_feed(data, train, vocab_size=VOCAB, place=ONLY, agent=AgentAddress(agent.key, NODE, "s"))
        found = [take(feed, number) for number in range(1, at + 1)]
    heldout = heldout_of(feed) if at == 3 else None
    found += [take(feed, number) for number in range(at + 1, 7)]
    assert found == expected
    if heldout is not None:
        assert heldout == heldout_of(feed) != []
    feed.close()
    assert "the ranks of this node read by themselves (data.reader=auto)" in capsys.readouterr().err


def test_when_the_agent_ends_before_a_checkpoint_is_loaded_its_position_is_taken_up_all_the_same(prefix: str) -> None:
    expected = expected_of(prefix, 6)
    data, train = configs([prefix], steps=6)
    with served([DataService(lambda line: None)]) as agent:
        feed = open_feed(data, train, vocab_size=VOCAB, place=ONLY, agent=AgentAddress(agent.key, NODE, "s"))
    assert feed.restore(expected[2][1]) == []
    assert [take(feed, number) for number in (4, 5, 6)] == expected[3:]
    feed.close()


def test_with_the_agent_asked_for_its_end_is_an_error_with_a_cure(prefix: str) -> None:
    data, train = configs([prefix], reader="agent")
    with served([DataService(lambda line: None)]) as agent:
        feed = open_feed(data, train, vocab_size=VOCAB, place=ONLY, agent=AgentAddress(agent.key, NODE, "s"))
        take(feed, 1)
    with pytest.raises(DataError, match=r"(?s)agent.*data\.reader=agent lets nobody else read.*data\.reader=auto"):
        for number in range(2, 6):
            take(feed, number)
    feed.close()


def test_an_agent_that_is_not_there_is_said_or_refused(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = AgentAddress("local.0.none", NODE, "s")
    data, train = configs([prefix], reader="agent")
    with pytest.raises(ConfigError, match="no driver has started a node agent here"):
        open_feed(data, train, vocab_size=VOCAB, place=ONLY, agent=None)
    with pytest.raises(DataError, match=r"data\.reader=agent, but no node agent answers on n1.*agent-n1\.log"):
        open_feed(data, train, vocab_size=VOCAB, place=ONLY, agent=nowhere, patience_s=0.2)
    data, train = configs([prefix])
    for address, said in ((None, "no driver started a node agent here"), (nowhere, "no node agent answers on n1")):
        feed = open_feed(data, train, vocab_size=VOCAB, place=ONLY, agent=address, patience_s=0.2, is_first=True)
        assert take(feed, 1) == expected_of(prefix, 6)[0]
        feed.close()
        captured = capsys.readouterr()
        assert said in captured.out + captured.err


def test_an_agent_that_comes_up_late_is_waited_for(prefix: str) -> None:
    data, train = configs([prefix])
    key, done = make_job_key(None, 0, 0, "late"), threading.Event()

    def late() -> None:
        time.sleep(0.3)
        with served([DataService(lambda line: None)], key):
            done.wait(timeout=20)

    thread = threading.Thread(target=late)
    thread.start()
    address = AgentAddress(key, NODE, "s")
    feed = open_feed(data, train, vocab_size=VOCAB, place=ONLY, agent=address, patience_s=10.0)
    assert take(feed, 1) == expected_of(prefix, 6)[0]
    feed.close()
    done.set()
    thread.join()


@pytest.mark.parametrize(
    ("readers", "stays"), [([[0, True], [0, True], [1, False]], True), ([[0, True], [0, False]], False)]
)
def test_the_agent_reads_for_all_ranks_of_a_node_or_for_none(
    prefix: str, readers: list[list[Any]], stays: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It waits for all of them: a rank that gave it up while it came up would leave the others waiting."""
    from hpc_train.train.build import agree_on_reader

    data, train = configs([prefix])
    world: Any = SimpleNamespace(node_rank=0, control=SimpleNamespace(all_gather=lambda value: readers))
    with served([DataService(lambda line: None)]) as agent:
        feed = open_feed(data, train, vocab_size=VOCAB, place=ONLY, agent=AgentAddress(agent.key, NODE, "s"))
        agree_on_reader(feed, world)
        assert feed.has_agent == stays
        assert take(feed, 1) == expected_of(prefix, 6)[0]
        feed.close()
    assert ("other ranks of this node have found no node agent" in capsys.readouterr().err) == (not stays)


def test_ending_does_not_wait_for_a_step_that_nobody_gives(prefix: str) -> None:
    """FC-39: a rank leaves at once; its thread waits for ranks of its node that have ended."""
    data, train = configs([prefix])
    place = ReadingPlace(dp=2, dp_rank=0, wants_tokens=True, local_rank=0, local_world_size=2)
    with served([DataService(lambda line: None)]) as agent:
        feed = open_feed(data, train, vocab_size=VOCAB, place=place, agent=AgentAddress(agent.key, NODE, "s"))
        feed._read_ahead(1)
        time.sleep(0.05)
        begin = time.monotonic()
        feed.close()
        assert time.monotonic() - begin < 5
        assert feed._ahead is not None
        assert isinstance(feed._ahead[1].exception(timeout=10), AgentGone)


def test_a_step_that_is_waited_for_long_is_told_with_who_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_LOOK_S", 0.02)
    monkeypatch.setattr(agent_wait, "_FIRST_WORD_S", 0.1)
    source, said = Slow(), []

    def tell(line: str) -> None:
        said.append(line)
        source.go.release()

    feed = Feed(source, last_step=1, tell=tell)
    assert list(feed.micro_batches(1)) == []
    feed.close()
    assert said and all("so far for the data of step 1, which a test reads" in line for line in said), said


def test_files_that_hang_under_an_agent_that_lives_end_the_wait_with_its_node(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks wait for this one in a collective, whose time-out would name nobody."""
    monkeypatch.setattr(node_reader.Session, "step", lambda session, peer, number: None)
    data, train = configs([prefix])
    limits = AgentLimits(silence_s=60.0, data_s=0.5, save_s=60.0)
    with served([DataService(lambda line: None)]) as agent:
        address = AgentAddress(agent.key, NODE, "s")
        feed = open_feed(data, train, vocab_size=VOCAB, place=ONLY, agent=address, limits=limits)
        with pytest.raises(DataError, match=rf"node agent of {NODE} has not come to the data of step 1 in \d+ s"):
            list(feed.micro_batches(1))
        feed.close()

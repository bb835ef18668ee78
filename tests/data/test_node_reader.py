"""The agent's reading for a node: each rank gets what it would read by itself, and each row is read once a node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hpc_train.cluster.agent_address import AgentGone
from hpc_train.cluster.memory_segment import LABEL_PREFIX
from hpc_train.config import DataConfig, TrainConfig
from hpc_train.data import ranges
from hpc_train.data.agent_batches import AgentAddress, AgentBatches, ReadingPlace
from hpc_train.data.batch_source import OwnBatches, Taken
from hpc_train.data.loader import Batch, Loader
from hpc_train.data.node_reader import STEPS_AHEAD, DataService
from hpc_train.data.node_steps import check_memory, spec_of
from hpc_train.errors import CheckpointError, ConfigError, DataError, HpcTrainError
from tests.agents import NODE, ServedAgent, served
from tests.cluster.test_memory_segment import descriptors_of
from tests.data.corpora import VOCAB, configs, numbered, own_batches, values, write


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """Two datasets, the second with a loss mask and 4-byte tokens; with documents shorter and longer than a row."""
    first = write(tmp_path / "first", numbered([3, 40, 0, 17, 9, 33, 16, 15, 1, 50]))
    second = write(tmp_path / "second", numbered([20, 7, 31, 64, 5], first=500), np.int32)
    return [first, second]


def places(dp: int, *, pp: int = 1, first: int = 0, count: int | None = None) -> list[ReadingPlace]:
    """Ranks of a node: (pp, dp) row-major; stages in the middle need no tokens."""
    count = pp * dp if count is None else count
    ranks = [divmod(rank, dp) for rank in range(first, first + count)]
    return [
        ReadingPlace(dp, place, stage in (0, pp - 1), local_rank=index, local_world_size=count)
        for index, (stage, place) in enumerate(ranks)
    ]


def together(agent: ServedAgent, data: DataConfig, train: TrainConfig, ranks: list[ReadingPlace], session: str = "s"):
    """All ranks of a node connect at once."""
    spec = spec_of(data, train, vocab_size=VOCAB, dp=ranks[0].dp)
    address = AgentAddress(agent.key, NODE, session)
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda place: AgentBatches(address, place, spec, patience_s=1.0), ranks))


def all_steps(sources: list[AgentBatches], numbers: range) -> list[list[list[Batch]]]:
    """Of each rank the batches of each step; every rank in a thread of its own."""

    def take(source: AgentBatches) -> list[list[Batch]]:
        return [source.step(number).batches for number in numbers]

    with ThreadPoolExecutor(len(sources)) as pool:
        return list(pool.map(take, sources))


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def segments() -> int:
    """How many of our segments of training steps this process has open."""
    return descriptors_of("self", "data.step_")


def is_read(number: int) -> bool:
    """Whether the agent has read a training step to its end and holds it: nobody writes to its segment any more."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith(f"/memfd:{LABEL_PREFIX}data.step_{number} "):
                return bool(fcntl.fcntl(int(entry), fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)
    return False


@pytest.mark.parametrize("dp, pp, micro", [(4, 1, 1), (2, 2, 2), (1, 3, 4), (8, 1, 1)])
def test_each_rank_gets_what_it_would_read_by_itself(
    agent: ServedAgent, two: list[str], dp: int, pp: int, micro: int
) -> None:
    data, train = configs(two, micro=micro)
    ranks = places(dp, pp=pp)
    sources = together(agent, data, train, ranks)
    for place, found in zip(ranks, all_steps(sources, range(1, 7)), strict=True):
        expected = own_batches(data, train, dp, place.dp_rank)
        if place.wants_tokens:
            assert [[values(batch) for batch in step] for step in found] == [
                [values(batch) for batch in step] for step in expected
            ]
        for step, own_step in zip(found, expected, strict=True):
            for batch, own in zip(step, own_step, strict=True):
                assert batch.positions.tolist() == own.positions.tolist()
                assert (batch.boundaries, batch.num_tokens) == (own.boundaries, own.num_tokens)
                assert batch.tokens.shape == own.tokens.shape and batch.sequences == own.sequences
    for source in sources:
        source.close()


def test_stages_in_the_middle_map_nothing_and_their_tensors_take_no_memory(
    agent: ServedAgent, two: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpc_train.data import agent_batches

    received = []
    original = agent_batches.Segment.received
    monkeypatch.setattr(agent_batches.Segment, "received", lambda fd: received.append(fd) or original(fd))
    data, train = configs(two)
    first, middle, last = together(agent, data, train, places(1, pp=3))
    batches = middle.step(1).batches
    assert received == [] and len(batches) == 8
    assert batches[0].tokens.untyped_storage().nbytes() == 8
    first.step(1)
    last.step(1)
    assert len(received) == 2
    for source in (first, middle, last):
        source.close()


def test_a_node_of_middle_stages_reads_no_byte_of_the_datasets(
    agent: ServedAgent, two: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges.RangeReader, "read", lambda self, wanted: pytest.fail("a dataset is read"))
    data, train = configs(two)
    sources = together(agent, data, train, places(2, pp=4, first=2, count=4))
    assert all(len(steps) == 3 for steps in all_steps(sources, range(1, 4)))
    for source in sources:
        source.close()


def test_the_union_of_a_nodes_ranks_is_read_once(
    agent: ServedAgent, two: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 ranks in 2 places of a dp axis of 4: half of the rows, each once, however many ranks share a place."""
    read: list[tuple[int, int]] = []
    original = ranges.RangeReader.read
    monkeypatch.setattr(ranges.RangeReader, "read", lambda self, wanted: read.extend(wanted) or original(self, wanted))
    data, train = configs(two[:1], steps=1)
    ranks = [ReadingPlace(4, 1 + index % 2, True, index, 8) for index in range(8)]
    sources = together(agent, data, train, ranks)
    all_steps(sources, range(1, 2))
    found = sorted(read)
    read.clear()
    for place in (1, 2):
        own_batches(data, train, 4, place)
    assert found == sorted(read) and len(found) == len(set(found))
    for source in sources:
        source.close()


def test_segments_go_with_the_last_rank_that_has_taken_them(agent: ServedAgent, two: list[str]) -> None:
    data, train = configs(two, steps=40)
    fast, slow = together(agent, data, train, places(2))
    fast.step(1)
    fast.step(2)
    eventually(lambda: segments() == 2 + STEPS_AHEAD)  # 1 and 2 for the slow rank, and those read ahead
    slow.step(1)
    slow.step(2)
    eventually(lambda: segments() == STEPS_AHEAD)
    slow.close()
    for number in range(3, 10):
        fast.step(number)
    eventually(lambda: segments() == STEPS_AHEAD)  # what a rank that has gone would have taken is not kept
    fast.close()
    eventually(lambda: segments() == 0)
    eventually(lambda: any(" steps from" in line for line in agent.log))
    # A step that was just taken may still have been counted as one ahead when the last rank left.
    (read,) = (int(found[1]) for line in agent.log if (found := re.search(r"(\d+) steps from", line)))
    assert 9 <= read <= 9 + STEPS_AHEAD


def test_nothing_is_read_behind_the_last_step(agent: ServedAgent, two: list[str]) -> None:
    data, train = configs(two, steps=2)
    (source,) = together(agent, data, train, places(1))
    source.step(1)
    source.step(2)
    source.close()
    eventually(lambda: any(": 2 steps from" in line for line in agent.log))


def test_a_position_is_taken_up_and_told_with_each_step(agent: ServedAgent, two: list[str]) -> None:
    """FC-84: over the end of an epoch."""
    data, train = configs(two, steps=12)
    own = OwnBatches(Loader(data, train, vocab_size=VOCAB, dp=2), 1)
    expected = [own.step(number) for number in range(1, 13)]
    first = together(agent, data, train, places(2), "one")
    for number in range(1, 6):
        states = [source.step(number).state for source in first]
        assert states == [expected[number - 1].state] * 2
    again = together(agent, data, train, places(2), "two")
    assert [source.restore(states[0]) for source in again] == [[], []]
    assert again[0].first_state() == states[0]
    taken = all_steps_with_state(again, 6)
    assert [values(batch) for batch in taken.batches] == [values(batch) for batch in expected[5].batches]
    assert taken.state == expected[5].state
    for source in (*first, *again):
        source.close()


def all_steps_with_state(sources: list[AgentBatches], number: int) -> Taken:
    """What the last of these ranks gets of a step that all take."""
    return [source.step(number) for source in sources][-1]


def test_held_out_rows_are_the_same_in_each_evaluation(agent: ServedAgent, two: list[str]) -> None:
    data, train = configs(two, heldout_fraction=0.4)
    own = OwnBatches(Loader(data, train, vocab_size=VOCAB, dp=2), 0)
    sources = together(agent, data, train, places(2))
    assert all(source.has_heldout for source in sources)
    for number in (1, 2):
        own.begin_evaluation()
        for source in sources:
            source.step(number)
            source.begin_evaluation()
        for step in range(2):
            expected, found = own.heldout_step(step), [source.heldout_step(step) for source in sources]
            assert found[0] and found[1] and expected
            assert [values(batch) for batch in found[0].batches] == [values(batch) for batch in expected.batches]
        assert own.heldout_step(2) is None and [source.heldout_step(2) for source in sources] == [None, None]
    for source in sources:
        source.close()


def test_what_is_wrong_with_the_data_is_the_error_of_every_rank(agent: ServedAgent, tmp_path: Path) -> None:
    data, train = configs([str(tmp_path / "none")])
    ranks = places(2)
    spec = spec_of(data, train, vocab_size=VOCAB, dp=2)
    for place in ranks:
        with pytest.raises(DataError, match=r"none\.idx does not exist"):
            AgentBatches(AgentAddress(agent.key, NODE, "s"), place, spec, patience_s=1.0)


def test_an_id_that_no_model_has_is_the_error_of_every_rank_when_it_is_read(agent: ServedAgent, tmp_path: Path) -> None:
    prefix = write(tmp_path / "set", [[1, 2, 3]], np.int32)
    np.array([1, -1, 3], "<i4").tofile(f"{prefix}.bin")
    data, train = configs([prefix], size=2)
    sources = together(agent, data, train, places(2))
    for source in sources:
        with pytest.raises(DataError, match=r"document 0 of .*set has the token id -1"):
            source.step(1)
        source.close()


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_file_that_is_shortened_while_it_is_read_is_the_error_of_all_that_is_asked_from_then_on(
    agent: ServedAgent, two: list[str], ending: str
) -> None:
    """Also of steps that were read ahead, and of who asks again; the log of the agent has it too."""
    data, train = configs(two[:1], steps=40, heldout_fraction=0.4)
    fast, slow = together(agent, data, train, places(2))
    state = fast.first_state()
    for source in (fast, slow):
        source.step(1)
    eventually(lambda: is_read(1 + STEPS_AHEAD))  # or step 2 would meet the shortened file, too
    os.truncate(f"{two[0]}{ending}", 60)
    fast.step(2)
    eventually(lambda: any("reading has failed" in line for line in agent.log) and segments() == 0)
    for source in (slow, fast):
        source.begin_evaluation()
        asked: list[Callable[[], object]] = [partial(source.step, number) for number in (2, 3, 3, 9)]
        for ask in (*asked, partial(source.heldout_step, 0), partial(source.restore, state)):
            with pytest.raises(DataError, match=rf"first\{ending} .*shortened under a running job") as found:
                ask()
            assert any(str(found.value) in line for line in agent.log)
        source.close()


def test_an_error_that_comes_while_a_position_is_taken_up_reaches_who_asked(agent: ServedAgent, two: list[str]) -> None:
    (source,) = together(agent, *configs(two), places(1))
    with pytest.raises(HpcTrainError, match="NoneType"):
        source.restore({**source.first_state(), "blend": None})
    source.close()


def test_a_changed_blend_is_refused_on_every_rank(agent: ServedAgent, two: list[str]) -> None:
    data, train = configs(two)
    state = Loader(*configs(two[:1]), vocab_size=VOCAB, dp=2).state()
    sources = together(agent, data, train, places(2))
    for source in sources:
        with pytest.raises(CheckpointError, match="1 sources became 2"):
            source.restore(state)
        source.close()


def test_ranks_that_ask_for_different_data_are_refused(agent: ServedAgent, two: list[str]) -> None:
    data, train = configs(two)
    others, _ = configs(two[:1])
    address = AgentAddress(agent.key, NODE, "s")
    one, two_ = places(2)
    first = AgentBatches(address, one, spec_of(data, train, vocab_size=VOCAB, dp=2), patience_s=1.0)
    with pytest.raises(Exception, match="ask for different data"):
        AgentBatches(address, two_, spec_of(others, train, vocab_size=VOCAB, dp=2), patience_s=1.0)
    with pytest.raises(Exception, match="has come already"):
        AgentBatches(address, one, spec_of(data, train, vocab_size=VOCAB, dp=2), patience_s=1.0)
    first.close()


def test_a_rank_that_waits_learns_that_the_agent_has_ended(two: list[str]) -> None:
    """Killed while a rank waits for ranks of its node that never come."""
    data, train = configs(two)
    with ThreadPoolExecutor(1) as pool:
        with served([DataService(lambda line: None)]) as agent:
            spec = spec_of(data, train, vocab_size=VOCAB, dp=2)
            source = AgentBatches(AgentAddress(agent.key, NODE, "s"), places(2)[0], spec, patience_s=1.0)
            waiting = pool.submit(source.step, 1)
            time.sleep(0.1)
        with pytest.raises(AgentGone):
            waiting.result(timeout=10)
        source.close()
    for thread in threading.enumerate():
        if thread.name.startswith("data s"):  # of the service, which has been told to end
            thread.join(60)
            assert not thread.is_alive()


def test_steps_that_memory_cannot_hold_are_refused_with_both_sizes() -> None:
    """FC-86: room for what is read ahead is looked at before it is read."""
    check_memory(100 << 20, 400 << 20, 4)
    check_memory(100 << 20, None, 4)
    with pytest.raises(ConfigError, match=r"100 MiB of tokens .* up to 4 are in memory .* 399 MiB are available"):
        check_memory(100 << 20, 399 << 20, 4)


def test_a_dataset_is_open_once_a_node_and_closed_when_its_ranks_have_gone(agent: ServedAgent, two: list[str]) -> None:
    """FC-72: nothing is opened before a client asks; there is nothing that a fork could share."""
    data, train = configs(two)
    sources = together(agent, data, train, places(4))
    assert _num_open(two[0]) == 0
    all_steps(sources, range(1, 3))
    assert _num_open(two[0]) == 1
    for source in sources:
        source.close()
    eventually(lambda: _num_open(two[0]) == 0)


def _num_open(prefix: str) -> int:
    found = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{entry}") == f"{prefix}.bin"
    return found

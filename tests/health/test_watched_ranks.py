"""Ranks that end without a word are put on record by the agent of their node; those that said goodbye are not."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_train.cluster.agent_greeting import Greeting
from hpc_train.health import watched_ranks
from hpc_train.health.watched_ranks import RankWatch
from hpc_train.log import FailureKind, read_failure, record_failure
from tests.agents import NODE, served
from tests.node_agents import wait_until


@dataclass
class Node:
    """An agent's server with nothing but the watch, and the ranks of its node."""

    folder: Path
    key: str
    watch: RankWatch
    log: list[str]
    ranks: list[subprocess.Popen[bytes]]

    def start_rank(self, rank: int, then: str) -> int:
        """A process that says hello as a rank and goes on with `then`; it is not waited for, so its status stays."""
        code = f"""
import os, signal
from hpc_train.cluster.agent_address import AgentConnection
agent = AgentConnection.open({self.key!r}, {NODE!r}, timeout_s=60.0)
agent.ask({{"say": "hello", "rank": {rank}}})
{then}
"""
        self.ranks.append(subprocess.Popen([sys.executable, "-c", code]))
        return self.ranks[-1].pid


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Node]:
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with served() as agent:
            watch = RankWatch(agent.server, NODE, folder, agent.log.append)
            agent.server.register(watch)
            yield Node(folder, agent.key, watch, agent.log, ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


ABORT = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
GOODBYE = 'agent.ask({"say": "hello.goodbye", "rank": 3})'


@pytest.mark.parametrize(
    ("then", "message", "returncode"),
    [
        (KILL, "ended without a word: killed by signal 9 (SIGKILL)", -9),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended without a word: killed by signal 11 (SIGSEGV)", -11),
        ("os._exit(7)", "ended without a word: ended with exit code 7", 7),
    ],
)
def test_a_rank_that_ends_without_a_word_is_put_on_record_with_how_it_ended(
    tmp_path: Path, then: str, message: str, returncode: int
) -> None:
    with running(tmp_path) as node:
        pid = node.start_rank(3, then)
        wait_until(lambda: read_failure(tmp_path) is not None)
    record = read_failure(tmp_path)
    assert record is not None
    assert (record["rank"], record["exit_code"], record["kind"]) == (3, 1, "ended")
    assert record["returncode"] == returncode
    assert str(record["message"]).startswith(message)
    assert any(line.startswith(f"rank 3, process {pid}, is gone without a word: ") for line in node.log)


@pytest.mark.parametrize("then", [f"{GOODBYE}; {KILL}", f"{GOODBYE}; os._exit(5)", "os._exit(0)"])
def test_a_rank_that_said_goodbye_or_ended_well_is_not(tmp_path: Path, then: str) -> None:
    with running(tmp_path) as node:
        pid = node.start_rank(3, then)
        wait_until(lambda: any(line.startswith(f"rank 3, process {pid}, is gone: ") for line in node.log))
    assert read_failure(tmp_path) is None


def test_a_failure_that_was_there_before_stays(tmp_path: Path) -> None:
    record_failure(tmp_path, rank=0, host="n2", exit_code=4, message="cut short", kind=FailureKind.OWN)
    with running(tmp_path) as node:
        node.start_rank(3, KILL)
        wait_until(lambda: any("gone without a word" in line for line in node.log))
    record = read_failure(tmp_path)
    assert record is not None
    assert (record["rank"], record["message"]) == (0, "cut short")
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]


def test_an_abort_is_recorded_after_an_end_that_it_may_follow_from_or_when_the_agent_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries abort a rank that has lost another, as NCCL's watchdog does."""
    monkeypatch.setattr(watched_ranks, "_ABORTED_S", 3600.0)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with running(first) as node:
        node.start_rank(3, ABORT)
        wait_until(lambda: any("killed by signal 6 (SIGABRT)" in line for line in node.log))
        node.start_rank(1, KILL)
        wait_until(lambda: read_failure(first) is not None)
    record = read_failure(first)
    assert record is not None and record["rank"] == 1
    with running(second) as node:
        node.start_rank(3, ABORT)
        wait_until(lambda: any("killed by signal 6 (SIGABRT)" in line for line in node.log))
        assert read_failure(second) is None
    record = read_failure(second)
    assert record is not None and record["rank"] == 3


@pytest.mark.parametrize(
    ("status", "killed", "words"),
    [
        (9, 2, "; out of memory: since it began the kernel has killed 2 of the processes of its cgroup for want of it"),
        (9, 0, "; the kernel has killed no process of its cgroup for want of memory"),
        (None, 1, "; out of memory: since it began the kernel has killed 1 of the processes of its cgroup for want"),
        (9, None, ""),
        (11, 1, ""),
        (3 << 8, 1, ""),
    ],
)
def test_memory_is_spoken_of_where_it_may_be_the_reason(status: int | None, killed: int | None, words: str) -> None:
    said = watched_ranks._memory_words(status, killed)
    assert said.startswith(words) and bool(said) == bool(words)


def test_a_rank_says_hello_as_soon_as_its_agent_is_up_and_goodbye_when_it_ends(tmp_path: Path) -> None:
    with running(tmp_path) as node:
        greeting = Greeting(node.key, NODE, 3)
        wait_until(lambda: 3 in node.watch.ranks)
        assert (node.watch.ranks[3].pid, node.watch.ranks[3].said_goodbye) == (os.getpid(), False)
        greeting.goodbye()
        assert node.watch.ranks[3].said_goodbye
    greeting.goodbye()  # the agent has ended: nobody hears it


def test_without_agents_a_rank_says_nothing() -> None:
    Greeting(None, NODE, 3).goodbye()

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cluster.agent_address import agent_socket_name, ask_agent, make_job_key
from tests.node_agents import wait_until


class RunningAgent:
    """An agent as the driver starts it, with the end of the pipe that tells it that the driver lives."""

    def __init__(self, folder: Path, key: str) -> None:
        self.key = key
        self.log = folder / "logs" / "agent-n1.log"
        (folder / "logs").mkdir(exist_ok=True)
        command = [sys.executable, "-m", "hpc_train.node_agent", "--run-dir", str(folder), "--job-key", key]
        self.process = subprocess.Popen([*command, "--node", "n1"], stdin=subprocess.PIPE)
        wait_until(lambda: self.ask({"say": "status"}) is not None)

    def ask(self, message: dict[str, Any]) -> dict[str, Any] | None:
        return ask_agent(self.key, "n1", message)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[RunningAgent]:
    running = RunningAgent(tmp_path, make_job_key(None, 0, os.getpid()))
    yield running
    running.end()


def test_a_rank_that_says_hello_is_watched_until_its_process_is_gone(agent: RunningAgent) -> None:
    hello = f"""
import os, sys
from hpc_train.cluster.agent_address import ask_agent
print(ask_agent({agent.key!r}, 'n1', {{"say": "hello", "rank": 3}}), flush=True)
sys.stdin.read()
"""
    rank = subprocess.Popen([sys.executable, "-c", hello], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert rank.stdin is not None
    assert rank.stdout is not None
    assert "'ok': True" in rank.stdout.readline()
    status = agent.ask({"say": "status"})
    assert status is not None
    assert [(entry["rank"], entry["pid"], entry["gone"]) for entry in status["ranks"]] == [(3, rank.pid, None)]
    rank.communicate()
    wait_until(lambda: f"rank 3, process {rank.pid}, is gone" in agent.log.read_text())
    status = agent.ask({"say": "status"})
    assert status is not None
    assert status["ranks"][0]["gone"] is not None


@pytest.mark.parametrize(
    "message", [{"say": "dance"}, {"say": "hello"}, {"rank": 1}, {"say": "hello.goodbye", "rank": 1}]
)
def test_messages_that_are_not_understood_are_answered_and_do_no_harm(
    agent: RunningAgent, message: dict[str, Any]
) -> None:
    answer = agent.ask(message)
    assert answer is not None
    assert "error" in answer
    assert agent.ask({"say": "status"}) is not None


def test_noise_does_no_harm(agent: RunningAgent) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(agent_socket_name(agent.key, "n1", os.getuid()))
        connection.sendall(b"not json\n\n\xff\n" + b"x" * 200_000)
    assert agent.ask({"say": "status"}) is not None


def test_it_ends_when_told_to(agent: RunningAgent) -> None:
    assert agent.ask({"say": "stop"}) == {"ok": True}
    assert agent.process.wait(timeout=60) == 0
    assert agent.ask({"say": "status"}) is None


def test_it_ends_on_int(agent: RunningAgent) -> None:
    agent.process.send_signal(signal.SIGINT)
    assert agent.process.wait(timeout=60) == 0
    assert "ends: SIGINT" in agent.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_what_asks_the_ranks_to_save_and_end_does_not_end_it(agent: RunningAgent, number: signal.Signals) -> None:
    """FC-31: Slurm's signals come to every process of a job, the helpers of ranks included."""
    agent.process.send_signal(number)
    wait_until(lambda: f"got {number.name} and goes on" in agent.log.read_text())
    assert agent.ask({"say": "status"}) is not None


def test_it_ends_when_the_driver_closes_its_end(agent: RunningAgent) -> None:
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    assert agent.process.wait(timeout=60) == 0
    assert "the driver has ended" in agent.log.read_text()


def test_it_ends_when_whoever_started_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    key = make_job_key(None, 1, os.getpid())
    start = f"""
import subprocess, sys
command = [sys.executable, "-m", "hpc_train.node_agent", "--run-dir", {str(tmp_path)!r}, "--job-key", {key!r}]
child = subprocess.Popen(command + ["--node", "n1"], stdin=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: ask_agent(key, "n1", {"say": "status"}) is not None)
    parent.kill()
    parent.communicate()
    wait_until(lambda: ask_agent(key, "n1", {"say": "status"}) is None)


def test_a_second_agent_of_the_same_start_is_refused(agent: RunningAgent, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpc_train.node_agent", "--run-dir", str(tmp_path), "--job-key", agent.key]
    second = subprocess.run([*command, "--node", "n1"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert second.returncode == 3
    assert "node agent on n1" in second.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can speak as another user")
def test_other_users_are_refused(agent: RunningAgent) -> None:
    speak = f"""
import os
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(agent_address.agent_socket_name({agent.key!r}, "n1", 0))
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(b'{{"say": "stop"}}\\n')
    with contextlib.suppress(ConnectionError):
        print(connection.recv(100))
print(agent_address.ask_agent({agent.key!r}, "n1", {{"say": "stop"}}))
"""
    # Read as root, since nobody may read a developer's folder.
    speak = "import contextlib, socket\nfrom hpc_train.cluster import agent_address\n" + speak
    done = subprocess.run([sys.executable, "-c", speak], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "None"
    assert agent.ask({"say": "status"}) is not None
    assert "of user 65534: this agent serves user 0" in agent.log.read_text()


def test_without_an_agent_there_is_no_answer_and_no_error() -> None:
    assert ask_agent("local.0", "n1", {"say": "status"}) is None


def test_a_key_names_the_job_its_restart_and_the_driver() -> None:
    keys = {make_job_key("7", 0, 10), make_job_key("7", 1, 10), make_job_key("7", 0, 11), make_job_key(None, 0, 10)}
    assert len(keys) == 4
    with pytest.raises(ValueError, match="too long"):
        agent_socket_name("x" * 120, "n1", 0)

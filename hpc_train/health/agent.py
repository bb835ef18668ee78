"""The node agent: one process a node beside the ranks, in a step of its own, so that it outlives them.

It watches the ranks of its node and puts on record how one ended that could not say so itself. What else it does are
services that it is given: it reads the data of its node's ranks, and writes their checkpoints. It speaks on an abstract
Unix socket and ends on INT, when told to stop, when its standard input ends, which the driver holds open, and when
whoever started it is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import queue
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from hpc_train.cluster.agent_address import agent_socket_name, this_node
from hpc_train.cluster.agent_service import Peer, Service
from hpc_train.cluster.environment import process_env
from hpc_train.health.agent_server import AgentServer
from hpc_train.health.watched_ranks import RankWatch
from hpc_train.log import timestamp

_PR_SET_PDEATHSIG = 1
_LAST_LINES_S = 2.0
"""How long the end waits for the log; assumed: less than the driver's patience with agents, which is 3 s."""


class _Own(Service):
    """A service of the agent itself, which has nothing to end."""

    def gone(self, peer: Peer) -> None:
        pass

    def close(self) -> None:
        pass


@final
class _Status(_Own):
    """`{"say": "status"}`: what the agent knows."""

    name = "status"

    def __init__(self, node: str, watch: RankWatch) -> None:
        self._node, self._watch = node, watch
        self._started = time.monotonic()

    def answer(self, peer: Peer, message: Mapping[str, Any], descriptors: Sequence[int]) -> Mapping[str, Any]:
        return {
            "node": self._node,
            "agent_pid": os.getpid(),
            "up_s": round(time.monotonic() - self._started, 3),
            "ranks": [vars(watched) for _, watched in sorted(self._watch.ranks.items())],
        }


@final
class _Stop(_Own):
    """`{"say": "stop"}`."""

    name = "stop"

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop = stop

    def answer(self, peer: Peer, message: Mapping[str, Any], descriptors: Sequence[int]) -> Mapping[str, Any]:
        self._stop("told to stop")
        return {"ok": True}


@final
class Agent:
    """Serves one node until it is stopped. `log` gets a line for each thing worth knowing."""

    def __init__(self, job_key: str, node: str, run_dir: Path, log: Callable[[str], None]) -> None:
        """Raises OSError where the node has an agent of this start already."""
        self._node, self._log = node, log
        self.server = AgentServer(agent_socket_name(job_key, node, os.getuid()), log)
        watch = RankWatch(self.server, node, run_dir, log)
        for service in (watch, _Status(node, watch), _Stop(self.stop)):
            self.server.register(service)

    def end_with_input(self, descriptor: int = 0) -> None:
        """Stop when this file ends: the other end is the driver's."""

        def look() -> None:
            if not os.read(descriptor, 4096):
                self.server.forget(descriptor)
                self.stop("the driver has ended")

        # A terminal or /dev/null is no driver's end of a pipe, and the second cannot be waited for.
        if stat.S_ISFIFO(mode := os.fstat(descriptor).st_mode) or stat.S_ISSOCK(mode):
            self.server.watch(descriptor, look)

    def serve(self, parent_is_alive: Callable[[], bool]) -> None:
        """Answer until stopped, or until `parent_is_alive` says no (asked every second)."""
        self._log(f"agent of {self._node} is ready, process {os.getpid()}")
        self.server.serve(parent_is_alive)

    def stop(self, reason: str) -> None:
        self._log(f"agent of {self._node} ends: {reason}")
        self.server.stop()


def run_agent(make_services: Callable[[Callable[[str], None]], Sequence[Service]], arguments: Sequence[str]) -> int:
    """Be the agent of this node, with these services, until the end; returns its exit code.

    make_services: Is given the log.
    """
    parser = argparse.ArgumentParser(prog="hpc_train.node_agent", allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--job-key", required=True)
    parser.add_argument("--node", default=this_node(process_env()))
    options = parser.parse_args(arguments)
    parent = os.getppid()
    _end_with_parent()
    if os.getppid() != parent:
        return 0
    with contextlib.closing(_Log(options.run_dir / "logs" / f"agent-{options.node}.log", options.node)) as log:
        try:
            agent = Agent(options.job_key, options.node, options.run_dir, log.say)
        except OSError as problem:
            log.say(f"no agent here: {problem}")
            print(f"node agent on {options.node}: {problem}", file=sys.stderr)
            return 3
        _serve(agent, make_services(log.say), log.say, parent)
    return 0


def _serve(agent: Agent, services: Sequence[Service], log: Callable[[str], None], parent: int) -> None:
    for service in services:
        agent.server.register(service)
    # Slurm's signals come to every step of a job. Those that ask ranks to save and end must not end what the ranks
    # need for it; the end of the driver, seen by its pipe and as the parent, ends the agent.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG, signal.SIGWINCH, signal.SIGHUP):
        signal.signal(number, lambda number, frame: log(f"got {signal.Signals(number).name} and goes on"))
    signal.signal(signal.SIGINT, lambda number, frame: agent.stop(signal.Signals(number).name))
    agent.end_with_input()
    agent.serve(lambda: os.getppid() == parent)


@final
class _Log:
    """The agent's log. A thread writes it: a file system that hangs must not hold up whoever asks the agent."""

    def __init__(self, path: Path, node: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._node = node
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """From any thread, and from signal handlers."""
        self._lines.put(f"{timestamp()} {self._node} agent | {text}\n".encode())

    def close(self) -> None:
        """Wait a little until all is written."""
        self._lines.put(None)
        self._thread.join(timeout=_LAST_LINES_S)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with suppress(OSError):  # a full disk must not end what the ranks need
                os.write(self._descriptor, line)


def _end_with_parent() -> None:
    """Get INT from the kernel when the parent (slurmstepd, or the driver on a laptop) ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)

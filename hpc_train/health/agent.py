"""The node agent: one process a node beside the ranks, in a step of its own, so that it outlives them.

So far it knows the ranks of its node and says when one of their processes is gone. It serves JSON lines on
an abstract Unix socket and ends on INT, when told to stop, when its standard input ends, which the driver
holds open, and when whoever started it is gone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import selectors
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpc_train.cluster.agent_address import agent_socket_name
from hpc_train.log import timestamp

_PR_SET_PDEATHSIG = 1
_MAX_LINE_BYTES = 65536


@dataclass
class WatchedRank:
    """A rank's process; `gone` is when it was seen to be gone."""

    rank: int
    pid: int
    since: str
    gone: str | None = None


class Agent:
    """Serves one node until it is stopped. `log` gets a line for each thing worth knowing."""

    def __init__(self, job_key: str, node: str, log: Callable[[str], None]) -> None:
        self._node = node
        self._log = log
        self._ranks: dict[int, WatchedRank] = {}
        self._selector = selectors.DefaultSelector()
        self._running = True
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(agent_socket_name(job_key, os.getuid()))
        self._listener.listen(256)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._started = time.monotonic()

    def end_with_input(self, descriptor: int = 0) -> None:
        """Stop when this file ends: the other end is the driver's."""

        def look() -> None:
            if not os.read(descriptor, 4096):
                self._selector.unregister(descriptor)
                self.stop("the driver has ended")

        # A terminal or /dev/null is no driver's end of a pipe, and the second cannot be waited for.
        if stat.S_ISFIFO(mode := os.fstat(descriptor).st_mode) or stat.S_ISSOCK(mode):
            self._selector.register(descriptor, selectors.EVENT_READ, look)

    def serve(self, parent_is_alive: Callable[[], bool]) -> None:
        """Answer until stopped, or until `parent_is_alive` says no (asked every second)."""
        self._log(f"agent of {self._node} is ready, process {os.getpid()}")
        while self._running:
            for key, _ in self._selector.select(timeout=1.0):
                key.data()
            if not parent_is_alive():
                self._log("whoever started this agent is gone: ending")
                break
        self._selector.close()
        self._listener.close()

    def stop(self, reason: str) -> None:
        self._log(f"agent of {self._node} ends: {reason}")
        self._running = False

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            self._log(f"refused process {pid} of user {uid}: this agent serves user {os.getuid()}")
            connection.close()
            return
        connection.setblocking(False)
        buffer = bytearray()
        self._selector.register(connection, selectors.EVENT_READ, partial(self._read, connection, pid, buffer))

    def _read(self, connection: socket.socket, pid: int, buffer: bytearray) -> None:
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        buffer += data
        while b"\n" in buffer:
            line, _, rest = bytes(buffer).partition(b"\n")
            buffer[:] = rest
            self._reply(connection, self._answer(line, pid))
        if not data or len(buffer) > _MAX_LINE_BYTES:
            self._selector.unregister(connection)
            connection.close()

    def _reply(self, connection: socket.socket, answer: dict[str, Any]) -> None:
        try:
            connection.sendall(json.dumps(answer).encode() + b"\n")
        except OSError as problem:
            self._log(f"an answer could not be sent: {problem}")

    def _answer(self, line: bytes, pid: int) -> dict[str, Any]:
        try:
            message = json.loads(line)
            kind = message["say"]
        except (ValueError, TypeError, KeyError):
            return {"error": "a message is a JSON object with the key 'say'"}
        if kind == "hello":
            rank = message.get("rank")
            if not isinstance(rank, int):
                return {"error": "hello needs a rank"}
            return self._watch(rank, pid)
        if kind == "status":
            return self._status()
        if kind == "stop":
            self.stop("told to stop")
            return {"ok": True}
        return {"error": f"unknown message {kind!r}; known are hello, status and stop"}

    def _watch(self, rank: int, pid: int) -> dict[str, Any]:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError as problem:
            return {"error": f"process {pid} cannot be watched: {problem.strerror}"}
        watched = self._ranks[rank] = WatchedRank(rank, pid, timestamp())
        self._selector.register(descriptor, selectors.EVENT_READ, partial(self._gone, descriptor, watched))
        self._log(f"rank {rank} is process {pid}")
        return {"ok": True, "node": self._node, "agent_pid": os.getpid()}

    def _gone(self, descriptor: int, watched: WatchedRank) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        watched.gone = timestamp()
        self._log(f"rank {watched.rank}, process {watched.pid}, is gone")

    def _status(self) -> dict[str, Any]:
        return {
            "node": self._node,
            "agent_pid": os.getpid(),
            "up_s": round(time.monotonic() - self._started, 3),
            "ranks": [vars(watched) for _, watched in sorted(self._ranks.items())],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent of this node; the driver starts it."""
    parser = argparse.ArgumentParser(prog="hpc_train.health.agent", allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--job-key", required=True)
    parser.add_argument("--node", default=socket.gethostname().partition(".")[0])
    options = parser.parse_args(arguments)
    parent = os.getppid()
    _end_with_parent()
    if os.getppid() != parent:
        return 0
    log = _open_log(options.run_dir / "logs" / f"agent-{options.node}.log", options.node)
    try:
        agent = Agent(options.job_key, options.node, log)
    except OSError as problem:
        log(f"no agent here: {problem}")
        print(f"node agent on {options.node}: {problem}", file=sys.stderr)
        return 3
    # Slurm's signals come to every step of a job. Those that ask ranks to save and end must not end what the ranks
    # need for it; the end of the driver, seen by its pipe and as the parent, ends the agent.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG, signal.SIGWINCH, signal.SIGHUP):
        signal.signal(number, lambda number, frame: log(f"got {signal.Signals(number).name} and goes on"))
    signal.signal(signal.SIGINT, lambda number, frame: agent.stop(signal.Signals(number).name))
    agent.end_with_input()
    agent.serve(lambda: os.getppid() == parent)
    return 0


def _open_log(path: Path, node: str) -> Callable[[str], None]:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def log(text: str) -> None:
        os.write(descriptor, f"{timestamp()} {node} agent | {text}\n".encode())

    return log


def _end_with_parent() -> None:
    """Get INT from the kernel when the parent (slurmstepd, or the driver on a laptop) ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())

"""The ranks of a node as its agent sees them: one that ends without a word is put on record.

A rank says goodbye when it ends by itself, after its last step or with an error, which it records. One that is killed
cannot, and what the others then say is only that they have lost somebody.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

from hpc_train.cluster.agent_service import Peer, Service
from hpc_train.cluster.process_end import describe_status, memory_kills, more_memory_kills, wait_status
from hpc_train.errors import ExitCode
from hpc_train.health.agent_server import AgentServer
from hpc_train.log import FailureKind, record_failure, timestamp

_ON_ITS_WAY_S = 0.1
"""A goodbye may still be unread when its sender is gone (assumed: the agent's thread is never busy for longer)."""
_ABORTED_S = 1.0
"""Before an abort is put on record: libraries abort a rank that has lost another one, whose end is to come first.

Assumed; less than the time for which ranks wait with an error of that kind (log.FOLLOWS_S).
"""
_LAST_RECORDS_S = 1.0
"""How long the agent's end waits for records; assumed: less than the driver's patience with agents, which is 3 s."""


@dataclass
class WatchedRank:
    """A rank's process; `gone` is when it was seen to be gone, `said_goodbye` that it ended by itself."""

    rank: int
    pid: int
    since: str
    gone: str | None = None
    said_goodbye: bool = False


@dataclass
class _Watch:
    """What it takes to say how a rank ended: a descriptor of its process, and the kernel's counts of its cgroup."""

    watched: WatchedRank
    descriptor: int
    memory_kills: Mapping[Path, int] = field(default_factory=dict)


@final
class RankWatch(Service):
    """`{"say": "hello", "rank": 3}`: the calling process is rank 3. `hello.goodbye`: it ends, and has said why."""

    name = "hello"

    def __init__(self, server: AgentServer, node: str, run_dir: Path, log: Callable[[str], None]) -> None:
        self._server, self._node, self._run_dir, self._log = server, node, run_dir, log
        self._agent_ends = threading.Event()
        self._records: list[threading.Thread] = []
        self.ranks: dict[int, WatchedRank] = {}

    def answer(self, peer: Peer, message: Mapping[str, Any], descriptors: Sequence[int]) -> Mapping[str, Any]:
        rank = message.get("rank")
        if not isinstance(rank, int):
            raise ValueError("hello needs a rank")
        if message["say"] == f"{self.name}.goodbye":
            watched = self.ranks.get(rank)
            if watched is None or watched.pid != peer.pid:
                raise ValueError(f"process {peer.pid} has not said hello as rank {rank}")
            watched.said_goodbye = True
        else:
            self._watch(rank, peer.pid)
        return {"ok": True, "node": self._node, "agent_pid": os.getpid()}

    def gone(self, peer: Peer) -> None:
        pass

    def close(self) -> None:
        """Put on record what is known of ranks that ended just now."""
        self._agent_ends.set()
        deadline = time.monotonic() + _LAST_RECORDS_S
        for thread in self._records:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _watch(self, rank: int, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError as problem:
            raise ValueError(f"process {pid} cannot be watched: {problem.strerror}") from problem
        watched = self.ranks[rank] = WatchedRank(rank, pid, timestamp())
        watch = _Watch(watched, descriptor, memory_kills(pid))
        self._server.watch(descriptor, partial(self._gone, watch))
        self._log(f"rank {rank} is process {pid}")

    def _gone(self, watch: _Watch) -> None:
        self._server.forget(watch.descriptor)
        watched = watch.watched
        watched.gone = timestamp()
        status = wait_status(watch.descriptor, watched.pid)
        # A file system that hangs must not hold up whoever asks the agent.
        thread = threading.Thread(
            target=self._judge, args=(watch, status), name=f"end of rank {watched.rank}", daemon=True
        )
        self._records.append(thread)
        thread.start()

    def _judge(self, watch: _Watch, status: int | None) -> None:
        """Say in the log how a rank ended and, if it had not said so itself, put it on record."""
        watched = watch.watched
        self._agent_ends.wait(_ON_ITS_WAY_S)
        if status is None:
            status = wait_status(watch.descriptor, watched.pid)
        os.close(watch.descriptor)
        how = "" if status is None else f": {describe_status(status)}"
        if watched.said_goodbye or status == 0:
            self._log(f"rank {watched.rank}, process {watched.pid}, is gone{how}")
            return
        how += _memory_words(status, more_memory_kills(watch.memory_kills))
        self._log(f"rank {watched.rank}, process {watched.pid}, is gone without a word{how}")
        if status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGABRT:
            self._agent_ends.wait(_ABORTED_S)
        record_failure(
            self._run_dir,
            rank=watched.rank,
            host=socket.gethostname(),
            exit_code=int(ExitCode.INTERNAL),
            message=f"ended without a word{how}",
            kind=FailureKind.ENDED,
            returncode=None if status is None else os.waitstatus_to_exitcode(status),
        )


def _memory_words(status: int | None, killed: int | None) -> str:
    """What the kernel's counts say of a rank that was killed, or may have been."""
    is_killed = status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
    if killed is None or not is_killed:
        return ""
    if killed <= 0:
        return "; the kernel has killed no process of its cgroup for want of memory"
    return (
        f"; out of memory: since it began the kernel has killed {killed} of the processes of its cgroup for want of it"
    )

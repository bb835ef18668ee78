"""Where the node agent of this run listens, and how to speak with it.

The address is an abstract Unix socket: it has no file, ends with its process, and every node has its own.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

from hpc_train.cluster.agent_wire import Inbox, WireError, parse_line, peer_of, send_message
from hpc_train.errors import LaunchError

JOB_KEY_VARIABLE = "HPC_TRAIN_JOB_KEY"
"""Set by the driver for the agents and the ranks that it starts."""
_PAUSE_S = 0.1
"""Between two looks whether an agent has come up (assumed: its own start takes as long)."""
_LOOK_S = 1.0
"""Between two looks at an answer that takes long (assumed: short beside what it is bound by)."""


class AgentGone(LaunchError):
    """No agent answers, or not any more."""


def make_job_key(job_id: str | None, restarts: int, pid: int, secret: str = "") -> str:
    """A key that no other start on these nodes has: the job and its restart, the driver's process, and a random word.

    Under the word nobody else can wait at the agent's address before it is there.
    """
    key = f"{job_id}.{restarts}.{pid}" if job_id else f"local.{pid}"
    return f"{key}.{secret}" if secret else key


def read_job_key(env: Mapping[str, str]) -> str | None:
    return env.get(JOB_KEY_VARIABLE)


def this_node(env: Mapping[str, str]) -> str:
    """What the plan calls this node: Slurm's name for it, else its host name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def agent_socket_name(job_key: str, node: str, uid: int) -> str:
    """The abstract address (it begins with a zero byte) of a node's agent of a start of a run.

    Nodes have addresses of their own each, but several that are one machine share them, so the node is in the name.
    """
    name = f"\0hpc_train.{uid}.{job_key}.{node}"
    # cited: unix(7), sun_path holds 108 bytes.
    if len(name.encode()) > 108:
        raise ValueError(f"the job key {job_key!r} and the node {node!r} are too long for a socket address")
    return name


@final
class AgentConnection:
    """A conversation with this node's agent: a request, then its answer, each with descriptors where it has some."""

    def __init__(self, connection: socket.socket) -> None:
        """Use `open`."""
        self._connection = connection
        self._timeout_s = connection.gettimeout()
        self._inbox = Inbox(connection)
        self._in_use = threading.Lock()

    @classmethod
    def open(cls, job_key: str, node: str, *, timeout_s: float = 2.0) -> AgentConnection:
        """Connect; timeout_s also bounds a request that sets no time of its own.

        Raises:
            AgentGone: nobody listens there, or somebody else does.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(agent_socket_name(job_key, node, os.getuid()))
            pid, uid = peer_of(connection)
        except (OSError, ValueError) as problem:
            connection.close()
            raise AgentGone(f"no node agent answers on {node}: {problem}") from problem
        if uid != os.getuid():
            connection.close()
            raise AgentGone(f"at the address of the agent of {node} is process {pid} of user {uid}, which is not ours")
        return cls(connection)

    @classmethod
    def open_patiently(
        cls, job_key: str, node: str, patience_s: float, look: Callable[[], None] = lambda: None
    ) -> AgentConnection:
        """Connect, and give an agent that has just been started that long to come up.

        look: called between looks for it.

        Raises:
            AgentGone: as `open`, at the end of patience.
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return cls.open(job_key, node)
            except AgentGone:
                if time.monotonic() > deadline:
                    raise
                look()
                time.sleep(_PAUSE_S)

    def ask(
        self,
        message: Mapping[str, Any],
        descriptors: Sequence[int] = (),
        *,
        timeout_s: float | None = None,
        look: Callable[[], None] | None = None,
    ) -> tuple[dict[str, Any], list[int]]:
        """Send a request and wait for its answer and the descriptors that come with it, which are the caller's.

        timeout_s: None: as given to `open`. After a time-out the conversation is of no use any more, nor is it after
        what `look` raised.
        look: called about every second while there is no answer, which then comes whenever `look` lets it: timeout_s
        bounds the sending alone.

        Raises:
            AgentGone: the agent has ended, does not answer in time, or answers what cannot be understood.
        """
        with self._in_use:
            return self._ask(message, descriptors, timeout_s, look)

    def _ask(
        self,
        message: Mapping[str, Any],
        descriptors: Sequence[int],
        timeout_s: float | None,
        look: Callable[[], None] | None,
    ) -> tuple[dict[str, Any], list[int]]:
        try:
            self._connection.settimeout(self._timeout_s if timeout_s is None else timeout_s)
            send_message(self._connection, message, descriptors)
            if look is not None:
                self._connection.settimeout(_LOOK_S)
            while (line := self._inbox.next_line()) is None:
                try:
                    is_open = self._inbox.receive()
                except TimeoutError:
                    if look is None:
                        raise
                    look()
                    continue
                if not is_open:
                    raise AgentGone("the node agent has ended")
            answer = parse_line(line)
            return answer, self._inbox.take_descriptors(answer)
        except TimeoutError as problem:
            raise AgentGone(f"the node agent did not answer {message.get('say')!r} in time") from problem
        except (OSError, WireError) as problem:
            raise AgentGone(f"the node agent is gone: {problem}") from problem

    def close(self) -> None:
        """End the conversation. Safe to call twice, and while another thread is in `ask`, which then raises."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._in_use:
            self._connection.close()
            self._inbox.close()


def ask_agent(job_key: str, node: str, message: Mapping[str, Any], *, timeout_s: float = 2.0) -> dict[str, Any] | None:
    """Send one message to the agent of a node and return its answer; None if no agent answers.

    Messages: `{"say": "hello", "rank": 3}` announces the calling process as a rank (the agent takes the process
    id from the kernel), `{"say": "hello.goodbye", "rank": 3}` that it ends by itself, `{"say": "status"}` asks what the
    agent knows, `{"say": "stop"}` ends it.
    """
    try:
        connection = AgentConnection.open(job_key, node, timeout_s=timeout_s)
    except AgentGone:
        return None
    try:
        answer, descriptors = connection.ask(message)
    except AgentGone:
        return None
    finally:
        connection.close()
    for descriptor in descriptors:
        os.close(descriptor)
    return answer

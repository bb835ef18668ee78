"""A node agent's server in a thread of the test, with services of the test's choice."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hpc_train.cluster.agent_address import AgentConnection, agent_socket_name, make_job_key
from hpc_train.cluster.agent_service import Service
from hpc_train.health.agent_server import AgentServer

NODE = "n1"


@dataclass
class ServedAgent:
    """A server that runs; `log` has its lines, `stop` ends it. What was connected is closed at the end."""

    key: str
    node: str = NODE
    log: list[str] = field(default_factory=list)
    stop: Callable[[], None] = lambda: None
    connections: list[AgentConnection] = field(default_factory=list)

    def connect(self) -> AgentConnection:
        self.connections.append(AgentConnection.open(self.key, self.node, timeout_s=20.0))
        return self.connections[-1]


@contextlib.contextmanager
def served(services: Sequence[Service] = (), key: str | None = None, node: str = NODE) -> Iterator[ServedAgent]:
    """An agent until the end of the block."""
    agent = ServedAgent(key or make_job_key(None, 0, os.getpid(), secrets.token_hex(4)), node)
    server = AgentServer(agent_socket_name(agent.key, node, os.getuid()), agent.log.append)
    for service in services:
        server.register(service)
    agent.stop = server.stop
    thread = threading.Thread(target=server.serve, args=(lambda: True,))
    thread.start()
    try:
        yield agent
    finally:
        for connection in agent.connections:
            connection.close()
        server.stop()
        thread.join(timeout=20)
        assert not thread.is_alive()

"""A node agent's server in a thread of the test, with services of the test's choice."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpc_train.cluster.agent_address import AgentConnection, agent_socket_name, make_job_key
from hpc_train.cluster.agent_service import Service
from hpc_train.health.agent_server import AgentServer

NODE = "n1"


@dataclass
class ServedAgent:
    """A server that runs; `log` has its lines, `stop` ends it. What was connected is closed at the end."""

    key: str
    server: AgentServer
    log: list[str]
    node: str = NODE
    connections: list[AgentConnection] = field(default_factory=list)

    def connect(self) -> AgentConnection:
        self.connections.append(AgentConnection.open(self.key, self.node, timeout_s=20.0))
        return self.connections[-1]

    def stop(self) -> None:
        self.server.stop()


@contextlib.contextmanager
def served(services: Sequence[Service] = (), key: str | None = None, node: str = NODE) -> Iterator[ServedAgent]:
    """An agent until the end of the block."""
    key, log = key or make_job_key(None, 0, os.getpid(), secrets.token_hex(4)), []
    server = AgentServer(agent_socket_name(key, node, os.getuid()), log.append)
    for service in services:
        server.register(service)
    agent = ServedAgent(key, server, log, node)
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

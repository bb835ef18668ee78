"""How a rank makes itself known to the agent of its node, and how it says that it ends by itself."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import final

from hpc_train.cluster.agent_address import AgentConnection, AgentGone

_PATIENCE_S = 60.0
"""For an agent to come up; assumed: on a busy cluster a second step starts that much after the first."""
_GOODBYE_S = 1.0
"""How long the end of a rank waits for a goodbye to be heard (assumed: an agent answers in milliseconds)."""


@final
class Greeting:
    """A rank's hello to its agent, said as soon as that is up; from then on the agent watches this process."""

    def __init__(self, job_key: str | None, node: str, rank: int) -> None:
        """Returns at once. job_key None: no driver has started agents, and nothing is said."""
        self._rank = rank
        self._lock = threading.Lock()
        self._is_over = False
        self._connection: AgentConnection | None = None
        if job_key is not None:
            threading.Thread(target=self._say_hello, args=(job_key, node), name="greeting", daemon=True).start()

    def goodbye(self) -> None:
        """This process ends by itself, or with an error that it says; what comes now is no end without a word."""
        with self._lock:
            self._is_over = True
            if self._connection is None:
                return
            with suppress(AgentGone):
                self._connection.ask({"say": "hello.goodbye", "rank": self._rank}, timeout_s=_GOODBYE_S)
            self._connection.close()
            self._connection = None

    def _say_hello(self, job_key: str, node: str) -> None:
        with suppress(AgentGone):
            connection = AgentConnection.open_patiently(job_key, node, _PATIENCE_S)
            with self._lock:
                if self._is_over:
                    connection.close()
                    return
                connection.ask({"say": "hello", "rank": self._rank})
                self._connection = connection

"""How the tasks of `exec` learn where rank 0 listens: rank 0 tells the driver, the others ask the driver.

The driver serves one line of JSON for one line of JSON, to those who know the run's token. Everybody keeps to
one deadline; when it passes, the driver can say which ranks it never heard from.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from hpc_train.errors import LaunchError

_MAX_LINE_BYTES = 4096
_HOLD_S = 2.0
"""How long a question is held open for rank 0's answer before the asker is told to come again."""


@dataclass(frozen=True)
class Endpoint:
    """Where rank 0 listens."""

    host: str
    port: int


class RendezvousServer:
    """Serves one run from a thread of its own. `port` and `token` go to the tasks by their environment."""

    def __init__(self, world_size: int, *, backlog: int = 4096) -> None:
        self.token = secrets.token_hex(16)
        self._world_size = world_size
        self._endpoint: Endpoint | None = None
        self._heard: set[int] = set()
        self._finished: set[int] = set()
        self._published, self._all_finished, self._ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._listener = socket.create_server(("", 0), backlog=backlog)
        self._backlog = backlog
        self.port: int = self._listener.getsockname()[1]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="rendezvous", daemon=True)
        self._is_ready = threading.Event()
        self._thread.start()
        self._is_ready.wait()

    def not_heard_from(self) -> list[int]:
        """Ranks that have neither published nor asked."""
        return sorted(set(range(self._world_size)) - self._heard)

    def close(self) -> None:
        """Stop serving; those who wait find the connection closed."""
        if self._thread.is_alive() and self._loop is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(timeout=5.0)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._serve, sock=self._listener, backlog=self._backlog)
        self._is_ready.set()
        await self._ended.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readuntil(b"\n"), timeout=10.0)
            answer = await self._answer(line)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass
        except asyncio.CancelledError:
            pass  # at the end only; the streams of Python 3.11 would log it as an error
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            message = json.loads(line)
            known = secrets.compare_digest(str(message["token"]), self.token)
            rank = int(message["rank"])
            hold_s = min(_HOLD_S, float(message.get("hold_s", _HOLD_S)))
        except (ValueError, KeyError, TypeError):
            return {"error": "not understood"}
        if not known or not 0 <= rank < self._world_size:
            return {"error": "this is another run's rendezvous"}
        self._heard.add(rank)
        if "port" in message:
            self._endpoint = Endpoint(str(message["host"]), int(message["port"]))
            self._published.set()
        if "finished" in message:
            self._finished.add(rank)
            if len(self._finished) == self._world_size:
                self._all_finished.set()
            if not message["finished"] or await _within(self._all_finished, hold_s):
                return {"finished": True}
            return {"wait": True}
        if await _within(self._published, hold_s):
            assert self._endpoint is not None
            return {"host": self._endpoint.host, "port": self._endpoint.port}
        return {"wait": True}


async def _within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout=timeout_s)
    except TimeoutError:
        return False
    return True


@dataclass(frozen=True)
class RendezvousClient:
    """A task's side. `deadline` is on this process's monotonic clock."""

    host: str
    port: int
    token: str
    rank: int
    deadline: float

    def publish(self, endpoint: Endpoint) -> None:
        """Rank 0 tells where it listens."""
        self._talk({"host": endpoint.host, "port": endpoint.port})

    def ask(self) -> Endpoint:
        """Where rank 0 listens, as soon as it is known.

        Raises:
            LaunchError: not known before the deadline.
        """
        return self._talk({})

    def finish(self, *, wait_for_all: bool) -> None:
        """Tell that this rank is done; wait for the others, however long they take, if asked to.

        If the driver is gone there is nobody left to wait for.
        """
        line = self._line({"finished": wait_for_all})
        answer: dict[str, Any] = {"wait": True}
        while answer.get("wait"):
            try:
                answer = self._once(line, _HOLD_S + 10.0)
            except (OSError, ValueError):
                return

    def _line(self, more: dict[str, Any]) -> bytes:
        return json.dumps({"token": self.token, "rank": self.rank, **more}).encode() + b"\n"

    def _talk(self, more: dict[str, Any]) -> Endpoint:
        """Try until the deadline. Waits grow and are random, so that thousands do not come again at once."""
        pause_s, silent, has_answered = 0.05, "rank 0 has not said where it listens", False
        problem = silent
        while (left_s := self.deadline - time.monotonic()) > 0:
            try:
                answer = self._once(self._line({**more, "hold_s": left_s / 2}), min(left_s, _HOLD_S + 10.0))
            except (OSError, ValueError) as error:
                # Of the last moments too little is left for an answer on a busy machine: that tells nothing new.
                if left_s > 1.0 or not has_answered:
                    problem = f"the driver at {self.host}:{self.port} does not answer ({error})"
                time.sleep(min(left_s, random.uniform(0.5, 1.5) * pause_s))
                pause_s = min(2.0, 2 * pause_s)
                continue
            if "error" in answer:
                raise LaunchError(
                    f"the rendezvous at {self.host}:{self.port} refuses rank {self.rank}: {answer['error']}"
                )
            if "port" in answer:
                return Endpoint(str(answer["host"]), int(answer["port"]))
            problem, has_answered = silent, True
        raise LaunchError(
            f"rank {self.rank} gave up: {problem}. The driver lists the ranks that it never heard from; "
            "raise the limit by --timeout SECONDS if the nodes are only slow to start"
        )

    def _once(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        with socket.create_connection((self.host, self.port), timeout=timeout_s) as connection:
            connection.sendall(line)
            with connection.makefile("rb") as answers:
                received = answers.readline(_MAX_LINE_BYTES)
        answer = json.loads(received)
        if not isinstance(answer, dict):
            raise ValueError("not an answer")
        return answer

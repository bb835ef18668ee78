"""The node agent's one thread: takes connections of its own user, hands their messages to services, sends answers.

Services may send later and from threads of their own. Nothing here waits for a client: what it does not take stays in
its outbox.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

from hpc_train.cluster.agent_service import Peer, Service, error_answer
from hpc_train.cluster.agent_wire import Inbox, WireError, encode, parse_line, peer_of, send_some
from hpc_train.errors import HpcTrainError

_PAUSE_S = 0.1
"""Before the next try to take a connection that could not be taken, for want of descriptors as a rule (assumed)."""
_MOST_WAITING = 1024
"""Messages that a client has not taken; assumed: one that leaves so many has ceased to listen."""


@final
class _Outgoing:
    """A line on its way, with copies of its descriptors until its first byte is sent."""

    def __init__(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        self.left = memoryview(encode(message, len(descriptors)))
        self.descriptors = [os.dup(number) for number in descriptors]

    def drop_descriptors(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


@final
class _Client(Peer):
    """A connection, what came over it, and what is to go."""

    def __init__(self, connection: socket.socket, pid: int, wake: Callable[[_Client], None]) -> None:
        self.connection, self.pid = connection, pid
        self.inbox = Inbox(connection)
        self.outbox: deque[_Outgoing] = deque()
        self.is_open = True
        self._wake = wake
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        with self._lock:
            if not self.is_open:
                return
            self.outbox.append(_Outgoing(message, descriptors))
        self._wake(self)

    def flush(self) -> bool:
        """Send what goes now; true if more is to go."""
        while self.outbox:
            first = self.outbox[0]
            try:
                sent = send_some(self.connection, first.left, first.descriptors)
            except BlockingIOError:
                return True
            first.drop_descriptors()
            first.left = first.left[sent:]
            if not first.left:
                self.outbox.popleft()
        return False

    def close(self) -> None:
        with self._lock:
            self.is_open = False
            while self.outbox:
                self.outbox.pop().drop_descriptors()
        self.inbox.close()
        self.connection.close()


@final
class AgentServer:
    """Listens at an address until it is stopped. `log` gets a line for each thing worth knowing.

    A message `{"say": "name.verb", ...}` goes to the service of that name.
    """

    def __init__(self, address: str, log: Callable[[str], None]) -> None:
        """Raises OSError where somebody listens there already."""
        self._log = log
        self._services: dict[str, Service] = {}
        self._clients: set[_Client] = set()
        self._running = True
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen(256)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        # Threads that send wake the loop: they put the client here and write one byte.
        self._to_flush: deque[_Client] = deque()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._flush_woken)

    def register(self, service: Service) -> None:
        assert service.name not in self._services, "two services of one name"
        self._services[service.name] = service

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call when a descriptor can be read, until `forget`."""
        self._selector.register(descriptor, selectors.EVENT_READ, call)

    def forget(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def serve(self, parent_is_alive: Callable[[], bool]) -> None:
        """Answer until stopped, or until `parent_is_alive` says no (asked every second)."""
        next_look = time.monotonic() + 1.0
        while self._running:
            for key, events in self._selector.select(timeout=1.0):
                if isinstance(key.data, _Client):
                    self._attend(key.data, events)
                else:
                    key.data()
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + 1.0
                if not parent_is_alive():
                    self._log("whoever started this agent is gone: ending")
                    break
        self._close()

    def stop(self) -> None:
        """End `serve` when what came before is answered. Signal handlers may call it."""
        self._running = False
        self._wake_loop()

    def _close(self) -> None:
        for service in self._services.values():
            service.close()
        for client in tuple(self._clients):
            with suppress(OSError):
                client.flush()
            self._drop(client)
        self._selector.close()
        for end in (self._listener, self._woken, self._waker):
            end.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as problem:
            self._log(f"a connection could not be taken: {problem}")
            time.sleep(_PAUSE_S)
            return
        pid, uid = peer_of(connection)
        if uid != os.getuid():
            self._log(f"refused process {pid} of user {uid}: this agent serves user {os.getuid()}")
            connection.close()
            return
        connection.setblocking(False)
        client = _Client(connection, pid, self._wake)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _wake(self, client: _Client) -> None:
        self._to_flush.append(client)
        self._wake_loop()

    def _wake_loop(self) -> None:
        with suppress(OSError):  # it is to wake already, or has ended
            self._waker.send(b"\0")

    def _flush_woken(self) -> None:
        self._woken.recv(4096)
        while self._to_flush:
            client = self._to_flush.popleft()
            if client in self._clients:
                self._flush(client)

    def _flush(self, client: _Client) -> None:
        try:
            more = client.flush()
        except OSError as problem:
            self._log(f"process {client.pid} does not take its answer: {problem}")
            self._drop(client)
            return
        if more and len(client.outbox) > _MOST_WAITING:
            self._log(f"process {client.pid} takes no answers: {len(client.outbox)} are waiting; it is left alone")
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0)
        self._selector.modify(client.connection, events, client)

    def _attend(self, client: _Client, events: int) -> None:
        if events & selectors.EVENT_READ and client in self._clients:
            self._read(client)
        if events & selectors.EVENT_WRITE and client in self._clients:
            self._flush(client)

    def _read(self, client: _Client) -> None:
        try:
            is_open = client.inbox.receive()
            while (line := client.inbox.next_line()) is not None:
                self._take(client, line)
                if client not in self._clients:
                    return
        except BlockingIOError:
            return
        except OSError:
            is_open = False
        except WireError as problem:
            self._log(f"process {client.pid} is left alone: {problem}")
            is_open = False
        if not is_open:
            self._drop(client)

    def _take(self, client: _Client, line: bytes) -> None:
        """Have a line answered; what is wrong with it is its answer."""
        try:
            message = parse_line(line)
            descriptors = client.inbox.take_descriptors(message)
        except WireError as problem:
            client.send(error_answer(problem))
            return
        say = message.get("say")
        service = self._services.get(say.partition(".")[0]) if isinstance(say, str) else None
        if service is None or not service.takes_descriptors:
            for descriptor in descriptors:
                os.close(descriptor)
            descriptors = []
        if service is None:
            known = ", ".join(sorted(self._services))
            client.send({"error": f"unknown message {say!r}; known are {known}", "kind": "ValueError"})
            return
        try:
            answer = service.answer(client, message, descriptors)
        except (HpcTrainError, ValueError, KeyError, TypeError) as problem:
            answer = error_answer(problem)
        if answer is not None:
            client.send(answer)

    def _drop(self, client: _Client) -> None:
        self._clients.discard(client)
        self._selector.unregister(client.connection)
        client.close()
        for service in self._services.values():
            service.gone(client)

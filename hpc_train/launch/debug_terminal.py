"""The driver's side of `run --debug-rank N`: its terminal becomes that of the debugger on rank N.

1. listen where the rank can reach this host, with a key that goes to the ranks in their environment
2. when the rank has called: copy lines that are typed to it, and its output to the terminal
3. Ctrl-C breaks into the rank; a second one without an answer ends the run as always
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
from types import TracebackType
from typing import Self

from hpc_train import log
from hpc_train.cluster.debug_channel import (
    END_OF_INPUT,
    GOES_ON,
    INTERRUPT,
    LINE,
    OUTPUT,
    WAITS,
    Channel,
    DebugRequest,
    answer,
    new_key,
)
from hpc_train.errors import LaunchError
from hpc_train.launch.follow import write_all


class DebugTerminal:
    """Listens from the start. As a context manager it serves one rank, and ends with the block."""

    def __init__(self, rank: int, address: str) -> None:
        """Raises LaunchError if this host cannot listen there."""
        try:
            self._listener = socket.create_server((address, 0))
        except OSError as problem:
            raise LaunchError(f"the debugger's terminal cannot listen on {address}: {problem.strerror}") from problem
        self.request = DebugRequest(rank, address, self._listener.getsockname()[1], new_key())
        self._listener.settimeout(0.5)
        self._ended = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        self._channel: Channel | None = None
        self._waits = False
        self._unanswered = False
        self._threads = [threading.Thread(target=self._serve, name="debug terminal", daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        os.write(self._wake_write, b"x")
        if self._channel is not None:
            self._channel.close()
        for thread in self._threads:
            thread.join(timeout=5.0)
        self._listener.close()

    def interrupt(self) -> bool:
        """Take a Ctrl-C; false if it is not for the rank: none is there, or the last one had no effect."""
        channel = self._channel
        if channel is None or self._unanswered:
            return False
        self._unanswered = True
        if self._waits:
            self._show(b"\n(c goes on, q ends the run, and so does Ctrl-C once more)\n")
            return True
        try:
            channel.send(INTERRUPT)
        except OSError:
            return False
        return True

    def _serve(self) -> None:
        channel = self._accept()
        if channel is None:
            return
        self._channel = channel
        log.say(
            f"hpc-train: the terminal of the debugger on rank {self.request.rank}. Ctrl-C breaks into the rank, "
            "the end of the input (Ctrl-D) lets it go on without a debugger, q ends the run"
        )
        reader = threading.Thread(target=self._copy_input, args=(channel,), name="debug input", daemon=True)
        self._threads.append(reader)
        reader.start()
        while (message := channel.receive()) is not None:
            kind, data = message
            if kind == OUTPUT:
                self._show(data)
            elif kind in (WAITS, GOES_ON):
                self._waits = kind == WAITS
                self._unanswered = False
                self._show(data)
        self._channel = None

    def _accept(self) -> Channel | None:
        """The first that calls and holds the key."""
        while not self._ended.is_set():
            try:
                connection, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return None
            channel = answer(connection, self.request.key)
            if channel is not None:
                return channel
            log.say(f"hpc-train: {peer[0]} called the debugger's terminal without its key; refused", sys.stderr)
        return None

    def _copy_input(self, channel: Channel) -> None:
        """Lines of standard input to the rank; not through Python's own buffer, which cannot be given up."""
        pending = b""
        with contextlib.suppress(OSError):
            while True:
                ready, _, _ = select.select([0, self._wake_read], [], [])
                if self._wake_read in ready:
                    return
                data = os.read(0, 4096)
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    channel.send(LINE, line + b"\n")
                self._unanswered = False
                if not data:
                    if pending:
                        channel.send(LINE, pending + b"\n")
                    channel.send(END_OF_INPUT)
                    return

    def _show(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            write_all(1, data)

"""The rank's side of `run --debug-rank N`: pdb over a connection to the driver's terminal.

The debugged rank stops before the training loop, at each breakpoint(), when Ctrl-C is typed, and after an error that
nobody caught. On all other ranks breakpoint() is passed over with a line in the log. When the terminal's input ends
or the connection is lost, the rank goes on without a debugger.
"""

from __future__ import annotations

import bdb
import contextlib
import io
import pdb
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import IO, Any, Self, cast

from hpc_train import log
from hpc_train.cluster.debug_channel import (
    GOES_ON,
    INTERRUPT,
    LINE,
    OUTPUT,
    WAITS,
    Channel,
    DebugRequest,
    call,
    read_debug_request,
)
from hpc_train.errors import HpcTrainError, LaunchError

_CALL_S = 30.0


def attach_debugger(env: Mapping[str, str], rank: int) -> Debugger:
    """What this rank does at breakpoints, as a context manager around its work.

    Raises:
        LaunchError: this rank is to be debugged and the driver's terminal cannot be reached.
    """
    request = read_debug_request(env)
    if request is None or request.rank != rank:
        return NoDebugger(env, request)
    try:
        channel = call(request.address, request.port, request.key, timeout_s=_CALL_S)
    except OSError as problem:
        raise LaunchError(
            f"rank {rank} cannot reach the debugger's terminal on {request.address}, port {request.port}: {problem}. "
            "Start the run on a node of the job (`srun --pty bash` in the salloc shell), if compute nodes cannot "
            "connect to this login node"
        ) from problem
    return AttachedDebugger(_RankPdb(channel, rank))


class NoDebugger:
    """breakpoint() is passed over: a debugger on a rank's own standard input would end the rank."""

    def __init__(self, env: Mapping[str, str], request: DebugRequest | None) -> None:
        self._chosen = bool(env.get("PYTHONBREAKPOINT"))
        self._why = "use `hpc-train run --debug-rank N`" if request is None else f"rank {request.rank} is debugged"
        self._said: set[tuple[str, int]] = set()

    def __enter__(self) -> Self:
        # Whoever has set PYTHONBREAKPOINT has chosen a debugger.
        if not self._chosen:
            sys.breakpointhook = self._pass_over
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.breakpointhook = sys.__breakpointhook__

    def stop_here(self) -> None:
        """Nothing to stop."""

    def _pass_over(self, *args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(1)
        place = (frame.f_code.co_filename, frame.f_lineno)
        if place not in self._said:
            self._said.add(place)
            log.say(f"breakpoint() at {place[0]}:{place[1]} is passed over from now on ({self._why})")


class AttachedDebugger:
    """This rank's own debugger."""

    def __init__(self, debugger: _RankPdb) -> None:
        self._pdb = debugger

    def __enter__(self) -> Self:
        sys.breakpointhook = self._at_breakpoint
        signal.signal(signal.SIGINT, self._at_interrupt)
        self._pdb.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(None)
        sys.breakpointhook = sys.__breakpointhook__
        if error is not None and not isinstance(error, bdb.BdbQuit):
            self._pdb.after_error(error, trace)
        self._pdb.close()
        if isinstance(error, bdb.BdbQuit):
            raise HpcTrainError(f"ended at the prompt of the debugger on rank {self._pdb.rank}") from None

    def stop_here(self) -> None:
        """Stop at the next line of the caller."""
        self._pdb.stop_in(sys._getframe(1))

    def _at_breakpoint(self, *args: Any, **kwargs: Any) -> None:
        self._pdb.stop_in(sys._getframe(1))

    def _at_interrupt(self, number: int, frame: FrameType | None) -> None:
        if frame is not None and not self._pdb.waits:
            self._pdb.stop_in(frame)


Debugger = NoDebugger | AttachedDebugger


class _RankPdb(pdb.Pdb):
    """pdb whose terminal is at the other end of a channel."""

    def __init__(self, channel: Channel, rank: int) -> None:
        self.rank = rank
        self.is_attached = True
        self._channel = channel
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._terminal = _Terminal(channel, self._lines)
        file = cast(IO[str], self._terminal)
        super().__init__(stdin=file, stdout=file, nosigint=True)
        self.prompt = f"(rank {rank}) "

    @property
    def waits(self) -> bool:
        """Whether somebody is asked for a line at this moment."""
        return self._terminal.waits

    def listen(self) -> None:
        threading.Thread(target=self._receive, name="debugger", daemon=True).start()

    def stop_in(self, frame: FrameType) -> None:
        if self.is_attached:
            self.set_trace(frame)

    def after_error(self, error: BaseException, trace: TracebackType | None) -> None:
        """Look at the frames of an error; whatever is typed, it goes its way afterwards."""
        if not self.is_attached:
            return
        self.message(f"rank {self.rank} has an error that nobody caught: {type(error).__name__}: {error}")
        self.reset()
        self.interaction(None, trace)

    def close(self) -> None:
        self.is_attached = False
        self._channel.close()

    def _receive(self) -> None:
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        while (message := self._channel.receive()) is not None:
            kind, data = message
            if kind == INTERRUPT:
                signal.pthread_kill(main_thread, signal.SIGINT)
            else:
                self._lines.put(data.decode(errors="replace") if kind == LINE else "")
        self._lines.put("")

    def lookupmodule(self, filename: str) -> str | None:
        """Breakpoints may name a module as it is imported, too: `b hpc_train.train.step:56`."""
        module = sys.modules.get(filename)
        file = getattr(module, "__file__", None)
        return file if isinstance(file, str) else super().lookupmodule(filename)

    def do_EOF(self, arg: str) -> bool:
        """EOF: let the rank go on without a debugger."""
        self.message("\nthe rank goes on without a debugger")
        self.is_attached = False
        self.clear_all_breaks()
        self.set_continue()
        return True

    def do_run(self, arg: str) -> None:
        """run: a rank cannot begin anew by itself."""
        self.error("a rank cannot begin anew; q ends the run")

    do_restart = do_run

    def do_interact(self, arg: str) -> None:
        """interact: needs a terminal of its own."""
        self.error("interact is not to be had here; statements can be typed as they are")


class _Terminal(io.TextIOBase):
    """The other end of the channel as a file to read lines from and to write to. A lost connection is its end.

    A line that has not ended yet is held back, since it may be the prompt: that is shown by whoever already knows
    that the rank waits, and so knows whom a Ctrl-C is for as soon as somebody can see the prompt.
    """

    def __init__(self, channel: Channel, lines: queue.SimpleQueue[str]) -> None:
        self._channel = channel
        self._lines = lines
        self._unfinished = ""
        self.waits = False

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        prompt, self._unfinished = self._unfinished, ""
        self.waits = True
        self._tell(WAITS, prompt.encode(errors="replace"))
        try:
            return self._lines.get()
        finally:
            self.waits = False
            self._tell(GOES_ON)

    def write(self, text: str) -> int:
        lines, end, self._unfinished = (self._unfinished + text).rpartition("\n")
        if end:
            self._tell(OUTPUT, (lines + end).encode(errors="replace"))
        return len(text)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def _tell(self, kind: bytes, data: bytes = b"") -> None:
        with contextlib.suppress(OSError):
            self._channel.send(kind, data)

"""A rank's side of the debugger: the rank is a process of its own, the test holds the terminal."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.cluster.debug_channel import (
    DEBUG_VARIABLE,
    END_OF_INPUT,
    INTERRUPT,
    LINE,
    OUTPUT,
    WAITS,
    Channel,
    DebugRequest,
    answer,
    new_key,
)

ROOT = Path(__file__).parents[2]

RANK = """\
import os, sys, time
from hpc_train.train.debugger import attach_debugger

def work(debugger):
    value = 41
    debugger.stop_here()
    value += 1
    breakpoint()
    print("value", value, flush=True)
    {more}
    return value

with attach_debugger(os.environ, {rank}) as debugger:
    work(debugger)
print("ended well", flush=True)
"""


class Debugged:
    """Rank 2 in a process, and the terminal's end of its channel."""

    def __init__(self, more: str = "pass") -> None:
        key = new_key()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            request = DebugRequest(2, "127.0.0.1", listener.getsockname()[1], key)
            self.process = start_rank(2, request, more)
            listener.settimeout(30)
            channel = answer(listener.accept()[0], key)
        assert channel is not None
        self.channel: Channel = channel

    def until_it_waits(self) -> str:
        """What it wrote until it wants the next line."""
        text = ""
        while (message := self.channel.receive()) is not None and message[0] != WAITS:
            text += message[1].decode() if message[0] == OUTPUT else ""
        if message is not None:
            # The terminal must know that the rank waits before anybody can see it and type Ctrl-C.
            assert message[1] in (b"(rank 2) ", b"(com) "), message
        return text

    def type(self, line: str) -> str:
        self.channel.send(LINE, f"{line}\n".encode())
        return self.until_it_waits()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=30)
        self.channel.close()
        return self.process.returncode, out, err


def start_rank(rank: int, request: DebugRequest, more: str = "pass", **env: str) -> subprocess.Popen[str]:
    variables = {"PYTHONPATH": str(ROOT), DEBUG_VARIABLE: request.to_text(), "PATH": "/usr/bin", "HOME": "/nowhere"}
    return subprocess.Popen(
        [sys.executable, "-c", RANK.format(rank=rank, more=more)],
        env={**variables, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_stops_before_the_work_and_at_breakpoints_and_prints_and_goes_on() -> None:
    rank = Debugged()
    assert "work()" in rank.until_it_waits()
    assert rank.type("p value") == "41\n"
    assert rank.type("print('typed', value)") == "typed 41\n"
    assert "work()" in rank.type("c")
    assert rank.type("p value").startswith("42")
    assert "cannot begin anew" in rank.type("run")
    assert rank.type("c") == ""
    assert rank.end() == (0, "value 42\nended well\n", "")


def test_a_module_is_named_as_it_is_imported_in_a_breakpoint() -> None:
    rank = Debugged("import hpc_train.errors; debugger.stop_here(); hpc_train.errors.HpcTrainError('x')")
    rank.until_it_waits()
    for line in ("c", "c"):
        rank.type(line)
    assert "hpc_train/errors.py:" in rank.type("b hpc_train.errors:16")
    rank.channel.send(END_OF_INPUT)
    assert rank.end()[0] == 0


def test_the_end_of_input_lets_the_rank_go_on_past_all_breakpoints() -> None:
    rank = Debugged()
    rank.until_it_waits()
    rank.channel.send(END_OF_INPUT)
    assert "goes on without a debugger" in rank.until_it_waits()
    assert rank.end() == (0, "value 42\nended well\n", "")


def test_a_connection_that_is_lost_does_not_hold_the_rank() -> None:
    rank = Debugged()
    rank.until_it_waits()
    rank.channel.close()
    assert rank.end()[:2] == (0, "value 42\nended well\n")


def test_an_interrupt_breaks_into_what_the_rank_does() -> None:
    rank = Debugged("\n    while value:\n        time.sleep(0.05)")
    rank.until_it_waits()
    rank.type("c")
    rank.channel.send(LINE, b"c\n")
    assert rank.process.stdout is not None and rank.process.stdout.readline() == "value 42\n"  # the loop is next
    rank.channel.send(INTERRUPT)
    assert "work()" in rank.until_it_waits()
    rank.type("value = 0")
    assert rank.type("c") == ""
    assert rank.end()[1] == "ended well\n"


def test_after_an_error_its_frames_can_be_looked_at_and_the_error_stands() -> None:
    rank = Debugged("raise ValueError(value)")
    rank.until_it_waits()
    rank.type("c")
    assert "an error that nobody caught: ValueError: 42" in rank.type("c")
    assert rank.type("p value").startswith("42")
    assert rank.type("c") == ""
    code, out, err = rank.end()
    assert (code, out) == (1, "value 42\n")
    assert "ValueError: 42" in err


def test_quitting_ends_the_rank_with_a_plain_error() -> None:
    rank = Debugged()
    rank.until_it_waits()
    assert rank.type("q") == ""
    code, _, err = rank.end()
    assert code != 0
    assert "HpcTrainError: ended at the prompt of the debugger on rank 2" in err


@pytest.mark.parametrize(("variable", "said"), [({}, True), ({"PYTHONBREAKPOINT": "0"}, False)])
def test_on_other_ranks_a_breakpoint_is_passed_over_with_one_line(variable: dict[str, str], said: bool) -> None:
    request = DebugRequest(2, "127.0.0.1", 1, new_key())
    process = start_rank(0, request, "\n    for _ in range(3): breakpoint()", **variable)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    lines = [line for line in out.splitlines() if "passed over" in line]
    assert len(lines) == (2 if said else 0)
    assert all("rank 2 is debugged" in line for line in lines)


def test_a_terminal_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc_train.errors import LaunchError
    from hpc_train.train import debugger

    monkeypatch.setattr(debugger, "_CALL_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    request = DebugRequest(0, "127.0.0.1", port, new_key())
    with pytest.raises(LaunchError, match=f"rank 0 cannot reach the debugger's terminal on 127.0.0.1, port {port}"):
        debugger.attach_debugger({DEBUG_VARIABLE: request.to_text()}, 0)

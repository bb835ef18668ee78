"""salloc as a child, so that its own exit codes, which it takes from no table, are told from those of its command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hpc_train.cluster.environment import scrubbed_for_submission
from hpc_train.errors import LaunchError

_START = "import os, sys; os.unlink(sys.argv[1]); os.execvp(sys.argv[2], sys.argv[2:])"
"""What salloc starts: it removes a file by which we see that the command was started, and becomes the command.

In Python, since some shells do not pass on functions that bash has exported, such as `module`.
"""


def run_salloc(salloc: str, options: Sequence[str], command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a command in an allocation and return its exit code, 128 + n if signal n ended it.

    Raises:
        LaunchError: salloc ended before the command was started; it has said why itself.
    """
    descriptor, mark = tempfile.mkstemp(prefix="hpc_train_salloc_")
    os.close(descriptor)
    argv = ["salloc", *options, sys.executable, "-SEc", _START, mark, *command]
    try:
        sys.stdout.flush()
        with _signals_passed_on() as pass_on_to:
            child = subprocess.Popen(argv, executable=salloc, env=scrubbed_for_submission(env))
            pass_on_to(child)
            code = child.wait()
        if code != 0 and os.path.exists(mark):
            raise LaunchError(
                f"salloc started nothing and ended with exit code {code}; its own words are above. Ask for what the "
                "site has (`sinfo`), or see what `hpc-train doctor` says of Slurm"
            )
    finally:
        Path(mark).unlink(missing_ok=True)
    return code if code >= 0 else 128 - code


@contextmanager
def _signals_passed_on() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """TERM and HUP are for salloc, which gives the nodes back. Ctrl-C and Ctrl-\\ the terminal gives it itself.

    Gives what is called with salloc's process; a signal that comes before is passed on then. Caught only behind
    salloc's start, one in between would end this process and leave salloc waiting in the queue.
    """
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGHUP) or not os.isatty(0):
            early.append(number)
            if children:
                send()

    def send() -> None:
        while early:
            children[0].send_signal(early.pop(0))

    def pass_on_to(child: subprocess.Popen[bytes]) -> None:
        children.append(child)
        send()

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    # What is ignored, as under nohup, stays so.
    before = {number: signal.getsignal(number) for number in numbers}
    changed = [number for number in numbers if before[number] is not signal.SIG_IGN]
    for number in changed:
        signal.signal(number, pass_on)
    try:
        yield pass_on_to
    finally:
        for number in changed:
            signal.signal(number, before[number])

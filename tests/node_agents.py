"""Node agents as processes of their own, as a driver starts them."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster.agent_address import AgentConnection, make_job_key
from tests.ranks import mpi_environment


@dataclass
class AgentProcess:
    """A running agent. key, node: its address. log: its file."""

    process: subprocess.Popen[bytes]
    key: str
    node: str
    log: Path

    def end(self, limit_s: float = 60.0) -> None:
        """As the driver does: close its standard input, and wait until it has written what it has."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(limit_s)


@contextlib.contextmanager
def agent_process(folder: Path, node: str = "n1", key: str | None = None) -> Iterator[AgentProcess]:
    """An agent that is ready; killed at the end if it still runs. folder: a run folder for its log."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    key = key or make_job_key(None, 0, os.getpid(), secrets.token_hex(4))
    command = [sys.executable, "-m", "hpc_train.node_agent", "--run-dir", str(folder), "--job-key", key, "--node", node]
    process = subprocess.Popen(command, env=mpi_environment(), stdin=subprocess.PIPE)
    try:
        AgentConnection.open_patiently(key, node, 60.0).close()
        yield AgentProcess(process, key, node, folder / "logs" / f"agent-{node}.log")
    finally:
        assert process.stdin is not None
        if process.poll() is None:
            process.kill()
            process.wait()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def resident_bytes(pid: int) -> int:
    """Memory of a process that is its own: without files and shared segments that it has mapped."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def wait_for(path: Path, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.01)

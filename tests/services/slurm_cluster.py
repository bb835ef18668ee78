"""The real Slurm cluster that tests run on: slurm/devcluster under a name that holds our pid.

It ends with the session whatever happens: by stop(), by atexit, and where we were killed outright, by
the next start on this machine, which removes clusters of dead owners.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DEVCLUSTER = Path(__file__).resolve().parents[2] / "slurm" / "devcluster"
_OURS = re.compile(r"test-(\d+)(-[a-z0-9-]*)?")


def devcluster(
    *arguments: str, timeout: float = 90.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the devcluster command; env comes on top of our environment."""
    return _run([sys.executable, str(DEVCLUSTER), *arguments], timeout, env)


def skip_reason() -> str | None:
    """Why no cluster can run here; None where one can."""
    checked = devcluster("check")
    return None if checked.returncode == 0 else checked.stderr.strip() or f"code {checked.returncode}"


def sweep() -> list[str]:
    """Stop the test clusters whose owner is dead; their names."""
    swept = []
    for name in devcluster("list").stdout.split():
        if (ours := _OURS.fullmatch(name)) and not os.path.exists(f"/proc/{ours[1]}"):
            devcluster("stop", "--name", name)
            swept.append(name)
    return swept


class SlurmCluster:
    """One cluster. name is test-PID, or test-PID-SUFFIX for a second one; also a context manager."""

    def __init__(self, name: str, nodes: int = 8, gpus: int = 8, options: Sequence[str] = ()) -> None:
        if not _OURS.fullmatch(name):
            raise ValueError(f"{name!r} is not test-PID or test-PID-SUFFIX, so nothing would ever sweep it")
        self.name = name
        self.num_nodes = nodes
        self._options = ["--nodes", str(nodes), "--gpus", str(gpus), *options]
        self.nodes: tuple[str, ...] = tuple(f"n{index}" for index in range(1, nodes + 1))

    def __enter__(self) -> SlurmCluster:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, or make it anew where it is broken. Raises RuntimeError with its last words."""
        sweep()
        atexit.register(self.stop)
        started = self.command("start", *self._options)
        if started.returncode:
            raise RuntimeError(f"devcluster start ended with {started.returncode}: {started.stderr}")

    def stop(self) -> None:
        """Stop it; nothing happens where it does not exist. Raises RuntimeError where that fails."""
        stopped = self.command("stop")
        if stopped.returncode:
            raise RuntimeError(f"devcluster stop ended with {stopped.returncode}: {stopped.stderr}")
        atexit.unregister(self.stop)

    def command(self, command: str, *arguments: str, timeout: float = 90.0) -> subprocess.CompletedProcess[str]:
        """`devcluster COMMAND --name OURS ARGUMENTS`: link, shape, status, ..."""
        return devcluster(command, "--name", self.name, *arguments, timeout=timeout)

    def status(self) -> dict[str, Any]:
        return json.loads(self.command("status", "--json").stdout)

    @property
    def conf(self) -> str:
        """The path of its slurm.conf, for SLURM_CONF."""
        return self.status()["conf"]

    def run(
        self,
        cmd: Sequence[str],
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        host: str = "login",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login host, or on a node, in this folder.

        Args:
            cmd: Program and arguments.
            timeout: Seconds, after which it and its children on this host are killed.
            env: Variables on top of ours; those of a Slurm job that we are in ourselves are left out.
            user: Whom to run it as; None for root.
            host: "login" or a node.

        Raises:
            subprocess.TimeoutExpired: with what it had printed.
        """
        inside = ["--name", self.name, "--host", host, *(["--user", user] if user else [])]
        return devcluster("exec", *inside, "--", *cmd, timeout=timeout, env=env)

    def kill_leftovers(self) -> None:
        """Cancel all jobs and kill all that they left on the nodes: for use between tests.

        Nothing happens where the cluster is not running, since a test may have broken it on purpose.
        """
        cleared = self.command("clear")
        if cleared.returncode and self.status()["status"] == "running":
            raise RuntimeError(f"devcluster clear ended with {cleared.returncode}: {cleared.stderr}")


def _run(command: Sequence[str], timeout: float, env: Mapping[str, str] | None) -> subprocess.CompletedProcess[str]:
    ours = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PMI"))}
    process = subprocess.Popen(
        command,
        env={**ours, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException as error:
        # Its children too, or they would hold the pipes open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise subprocess.TimeoutExpired(command, timeout, out, err) from None
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)

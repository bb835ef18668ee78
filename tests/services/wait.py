"""Until a server of a test takes connections."""

from __future__ import annotations

import socket
import subprocess
import time

_START_S = 60.0


def wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    """Until something listens on this host's port; fails where the server has ended, or does not come up."""
    deadline = time.monotonic() + _START_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert server.poll() is None, f"the server of port {port} has ended with code {server.returncode}"
        assert time.monotonic() < deadline, f"nothing listens on port {port}"
        time.sleep(0.02)

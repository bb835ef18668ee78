"""Where the node agent of this run listens, and a client for its small messages.

The address is an abstract Unix socket: it has no file, ends with its process, and every node has its own.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

JOB_KEY_VARIABLE = "HPC_TRAIN_JOB_KEY"
"""Set by the driver for the agents and the ranks that it starts."""


def make_job_key(job_id: str | None, restarts: int, pid: int) -> str:
    """A key that no other start on these nodes has: the job and its restart, and the driver's process."""
    return f"{job_id}.{restarts}.{pid}" if job_id else f"local.{pid}"


def read_job_key(env: Mapping[str, str]) -> str | None:
    return env.get(JOB_KEY_VARIABLE)


def agent_socket_name(job_key: str, uid: int) -> str:
    """The abstract address (it begins with a zero byte) of the agent of a start of a run."""
    name = f"\0hpc_train.{uid}.{job_key}"
    # cited: unix(7), sun_path holds 108 bytes.
    if len(name.encode()) > 108:
        raise ValueError(f"the job key {job_key!r} is too long for a socket address")
    return name


def ask_agent(job_key: str, uid: int, message: Mapping[str, Any], *, timeout_s: float = 2.0) -> dict[str, Any] | None:
    """Send one message to the agent of this node and return its answer; None if no agent answers.

    Messages: `{"say": "hello", "rank": 3}` announces the calling process as a rank (the agent takes the process
    id from the kernel), `{"say": "status"}` asks what it knows, `{"say": "stop"}` ends it.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(agent_socket_name(job_key, uid))
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile("rb") as answers:
                answer = json.loads(answers.readline() or b"null")
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None

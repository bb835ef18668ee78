"""Which errors only say that somebody else is gone: another rank, or this node's agent."""

from __future__ import annotations

import re

from hpc_train.cluster.agent_address import AgentGone

# Seen with torch 2.13 on gloo and with its store; cited for NCCL from its error strings, for MPI from its standard.
_SAYS_LOST = re.compile(
    r"connection closed by (remote )?peer|connection reset by (remote )?peer|broken pipe|"
    r"connection was likely closed|ncclRemoteError|NCCL communicator was aborted|MPI_ERR_PROC_(FAILED|ABORTED)",
    re.IGNORECASE,
)
_OF_COMMUNICATION = re.compile(r"gloo|nccl|SocketImpl|TCPStore|MPI_ERR", re.IGNORECASE)


def says_lost_peer(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, is that another rank or the node's agent is not there any more.

    A time-out is none: who came too late may be this rank as well as another.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, AgentGone):
            return True
        text = str(cause)
        if isinstance(cause, RuntimeError) and _OF_COMMUNICATION.search(text) and _SAYS_LOST.search(text):
            return True
        cause = cause.__cause__
    return False

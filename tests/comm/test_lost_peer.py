"""Errors that only say that somebody else is gone."""

from __future__ import annotations

import pytest

from hpc_train.cluster.agent_address import AgentGone
from hpc_train.comm.lost_peer import says_lost_peer
from hpc_train.errors import CheckpointError, DataError


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4242"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:538] Read error [10.0.0.2]:4242: Connection reset by peer"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:262] writev [10.0.0.2]:4242: Broken pipe"),
        RuntimeError("[c10d] recvValue failed on SocketImpl(fd=4): failed to recv. Connection was likely closed."),
        RuntimeError("NCCL error in: NCCLUtils.cpp:94, remote process exited, ncclRemoteError: A call failed possibly"),
        RuntimeError("MPI_ERR_PROC_FAILED: Process Failure"),
        AgentGone("the node agent has ended"),
        raised_from(CheckpointError("checkpoint.writer=agent, but the agent has ended"), AgentGone("it has ended")),
    ],
)
def test_another_rank_or_the_agent_is_gone(error: Exception) -> None:
    assert says_lost_peer(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("size mismatch"),
        RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv operation"),
        DataError("hdfs://n1/corpus: Connection reset by peer"),
        BrokenPipeError("Broken pipe"),
        ValueError("gloo: Connection closed by peer"),
    ],
)
def test_these_are_somebody_s_own(error: Exception) -> None:
    assert not says_lost_peer(error)

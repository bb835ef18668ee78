"""`python -m hpc_train.node_agent`: the node agent with all its services; the driver starts one on each node."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from hpc_train.cluster.agent_service import Service
from hpc_train.cluster.scratch import use_private_caches
from hpc_train.health.agent import run_agent


def services(log: Callable[[str], None]) -> Sequence[Service]:
    """What the agent does beside watching its ranks. None of it imports torch, or anything before it is asked."""
    from hpc_train.checkpoint.copies.copy_service import CopyService
    from hpc_train.checkpoint.saving.node_writer import CheckpointService
    from hpc_train.data.node_reader import DataService

    copies = CopyService(log)
    # In the order in which they end: what saves have left to copy comes before the copies are given up.
    return [DataService(log), CheckpointService(log, copies), copies]


if __name__ == "__main__":
    if note := use_private_caches():
        print(note, file=sys.stderr)
    sys.exit(run_agent(services, sys.argv[1:]))

"""A rank that bootstraps as its arguments say, one time after another, and prints what it became, a JSON line each.

Its exit code is that of the first error.
"""

from __future__ import annotations

import json
import sys

import hpc_train
from hpc_train.cluster.allocation import Allocation
from hpc_train.errors import HpcTrainError
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.run import Plan, PlannedRank, plan_mesh


def reversed_plan(node: str, size: int) -> Plan:
    """The last slot is rank 0: the launcher's first process is the last rank."""
    mesh = Mesh(pp=1, dp=size, cp=1, tp=1)
    plan = plan_mesh(mesh, Allocation((node,), (size,), (0,), None, "test"))
    ranks = tuple(PlannedRank(planned.rank, node, size - 1 - planned.gpu, planned.coords) for planned in plan.ranks)
    return Plan(mesh, ranks, plan.groups)


def main() -> int:
    source, *wanted = sys.argv[1:]
    return next(filter(None, [become(source, what) for what in wanted]), 0)


def become(source: str, what: str) -> int:
    import os
    import socket

    import torch
    import torch.distributed as dist

    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    first = os.environ.get("OMPI_COMM_WORLD_RANK") == "0"
    plan = reversed_plan(socket.gethostname(), size) if what != "plain" else None
    if what == "another plan on one rank" and first:
        plan = reversed_plan(socket.gethostname(), size + 1)
    try:
        world = hpc_train.bootstrap(source, plan=plan)
    except HpcTrainError as error:
        print(json.dumps({"what": what, "error": str(error)}), flush=True)
        return int(error.exit_code)
    total = torch.tensor([float(world.rank)])
    if world.world_size > 1:
        dist.all_reduce(total)
    facts = {
        "what": what,
        "rank": world.rank,
        "world_size": world.world_size,
        "local_rank": world.local_rank,
        "launcher_rank": int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0"))),
        "sum": total.item(),
        "gathered": world.control.all_gather({"rank": world.rank}),
        "gathered_at_last": world.control.gather("x" * world.rank, root=world.world_size - 1),
        "told": world.control.broadcast(["from", world.rank], root=world.world_size - 1),
    }
    print(json.dumps(facts), flush=True)
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

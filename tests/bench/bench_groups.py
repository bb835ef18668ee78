"""Time to make the groups of a mesh: ours, megatron-core's and torch's, on gloo ranks in one run.

    python -m tests.bench.bench_groups [--ranks 32] [--rounds 3]

Each contender gets ranks of its own, started anew in each round, with nothing but the group of all ranks in them. The
time is from a barrier of all ranks to the barrier behind the last group, the slowest rank's. Prints one line of JSON:
medians in seconds and ratios of medians. `all_kinds` are those of hpc_train.plan.groups, `every_combination` also every
further combination of axes, `four_axes` what init_device_mesh makes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch.distributed as dist

from hpc_train.plan.groups import AXIS_KINDS, GroupPlan, kind_of
from hpc_train.plan.mesh import AXES, Mesh
from tests.ranks import TestRank, run_ranks
from tests.worlds import make_world


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ranks", type=int, default=32, help="a multiple of 8; dp takes what pp=2, cp=2, tp=2 leave")
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    mesh = Mesh.fill(args.ranks, pp=2, cp=2, tp=2)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(args.rounds):
        for name in CONTENDERS:
            times[name].append(_time(name, mesh))
    median = {name: statistics.median(values) for name, values in times.items()}
    ratios = {
        "all_kinds / megatron": median["all_kinds"] / median["megatron"],
        "all_kinds / megatron_without_gloo_copies": median["all_kinds"] / median["megatron_without_gloo_copies"],
        "every_combination / megatron": median["every_combination"] / median["megatron"],
        "four_axes / init_device_mesh": median["four_axes"] / median["init_device_mesh"],
    }
    answer = {"mesh": mesh.describe(), "rounds": args.rounds, "median_s": _rounded(median), "ratio": _rounded(ratios)}
    print(json.dumps(answer))


def _time(name: str, mesh: Mesh) -> float:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return max(run_ranks(_rank, mesh.world_size, name, mesh, store.port, backend=None, timeout_s=300.0))


def _rank(me: TestRank, name: str, mesh: Mesh, port: int) -> float:
    warnings.simplefilter("ignore")  # megatron-core's imports warn of what is not installed
    limit = timedelta(seconds=300)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world_size, timeout=limit)
    make = CONTENDERS[name](me, mesh)
    dist.barrier()
    start_s = time.perf_counter()
    kept = make()
    dist.barrier()
    duration_s = time.perf_counter() - start_s
    del kept
    return duration_s


def _ours(plan_of: Callable[[Mesh], GroupPlan]) -> Callable[[TestRank, Mesh], Callable[[], Any]]:
    def prepare(me: TestRank, mesh: Mesh) -> Callable[[], Any]:
        from hpc_train.comm.groups import build_groups

        world = make_world(me)
        return lambda: build_groups(world, plan_of(mesh))

    return prepare


def _every_combination(mesh: Mesh) -> GroupPlan:
    several = [kind_of(*axes) for count in (2, 3, 4) for axes in combinations(AXES, count)]
    return GroupPlan(mesh).with_kinds(several)


def _megatron(**settings: Any) -> Callable[[TestRank, Mesh], Callable[[], Any]]:
    def prepare(me: TestRank, mesh: Mesh) -> Callable[[], Any]:
        from megatron.core import parallel_state

        return lambda: parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=mesh.tp,
            pipeline_model_parallel_size=mesh.pp,
            context_parallel_size=mesh.cp,
            **settings,
        )

    return prepare


def _device_mesh(me: TestRank, mesh: Mesh) -> Callable[[], Any]:
    from torch.distributed.device_mesh import init_device_mesh

    return lambda: init_device_mesh("cpu", tuple(mesh.axes.values()), mesh_dim_names=AXES)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


CONTENDERS: dict[str, Callable[[TestRank, Mesh], Callable[[], Any]]] = {
    "all_kinds": _ours(GroupPlan),
    "megatron": _megatron(),
    "megatron_without_gloo_copies": _megatron(create_gloo_process_groups=False),
    "every_combination": _ours(_every_combination),
    "four_axes": _ours(lambda mesh: GroupPlan(mesh, AXIS_KINDS)),
    "init_device_mesh": _device_mesh,
}

if __name__ == "__main__":
    main()

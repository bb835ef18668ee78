"""What rings send out of a leaf: laid along the placement, against the same plan with rings in arbitrary order.

128 nodes of 8 GPUs in runs of one to four neighbours, anywhere in a fabric twice as large whose leaves have 32 nodes a
rail; tp 1, 2 and 8. Prints JSON.

    python -m tests.bench.bench_hdp_placement [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from typing import Any

import numpy as np

from hpc_train.cluster.fabric_clos import clos_fabric
from hpc_train.plan.axis_bytes import AxisTraffic
from hpc_train.plan.batch_balanced import BalancedPlanner
from hpc_train.plan.batch_places import hdp_places
from hpc_train.plan.batch_problem import BatchProblem, HdpRanks
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.place import place
from tests.bench.bench_hdp_planner import CAPACITY, COSTS
from tests.bench.hdp_lengths import tailed_lengths
from tests.plan.fabrics import make_allocation
from tests.plan.ring_traffic import ring_bytes_by_tier

NUM_NODES = 128


def measure(seed: int, tp: int) -> dict[str, Any]:
    rng = random.Random(seed)
    fabric = clos_fabric(f"clos:pods=4,nodes=64,shuffle={seed}")
    # Neighbours in the fabric; their names tell nothing of it.
    by_place = sorted(
        fabric.nodes, key=lambda name: (fabric.pod_of_leaf[fabric.nodes[name].leaves[0]], fabric.nodes[name].leaves)
    )
    chosen: dict[str, None] = {}
    while len(chosen) < NUM_NODES:
        start = rng.randrange(len(by_place))
        chosen.update(dict.fromkeys(by_place[start : start + rng.randint(1, 4)][: NUM_NODES - len(chosen)]))
    mesh = Mesh.fill(NUM_NODES * 8, pp=1, cp=1, tp=tp)
    placement = place(mesh, make_allocation(sorted(chosen)), fabric, [AxisTraffic("dp", "ring", 10**9, 0)])
    order, host, port = hdp_places(placement, fabric)
    # A rank of tp GPUs holds tp times as much.
    ranks = HdpRanks.make(np.full(mesh.dp, CAPACITY * tp), None, (order, host, port))
    table = BalancedPlanner().plan(BatchProblem.make(0, tailed_lengths(seed), ranks, COSTS))
    shuffled, generator = table.ranks.copy(), np.random.default_rng(seed)
    for first, last in zip(table.first_rank[:-1], table.first_rank[1:], strict=True):
        generator.shuffle(shuffled[first:last])
    # 8 groups of keys and values of 128 numbers of 2 bytes, shared by tp ranks (cited: ByteScale's LLaMA-7B).
    bytes_per_token = 8 * 128 * 2 * 2 // tp
    ours = ring_bytes_by_tier(table, placement, fabric, bytes_per_token)
    arbitrary = ring_bytes_by_tier(replace(table, ranks=shuffled), placement, fabric, bytes_per_token)

    def leaving(by_tier: dict[str, int]) -> int:
        return by_tier["spine"] + by_tier["core"]

    return {
        "seed": seed, "tp": tp, "laid": ours, "arbitrary": arbitrary,
        "leaving_a_leaf": leaving(ours) / leaving(arbitrary),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    found = [measure(seed, tp) for tp in (1, 2, 8) for seed in range(arguments.seeds)]
    worst = max(entry["leaving_a_leaf"] for entry in found)
    print(json.dumps({"worst_leaving_a_leaf": worst, "runs": found}, indent=1))


if __name__ == "__main__":
    main()

"""Time and memory of planning a placement at scale: a random 80 % of a three-tier fabric with eight rails.

Each figure is of a fresh process: the time to place all ranks (wall and processor), that to list all groups after it,
and the largest resident memory of the process, Python and NumPy included. Prints JSON.

    python -m tests.bench.bench_placement [--nodes 1024 2048] [--repeat 3]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from hpc_train.cluster.fabric_clos import clos_fabric
from hpc_train.plan.axis_bytes import AxisTraffic
from hpc_train.plan.groups import GroupPlan
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.place import place
from hpc_train.plan.traffic import measure_traffic
from tests.plan.fabrics import make_allocation

NODES_OF_A_POD = 256
# pp, cp, tp; dp is what is left over. Bytes are of a 175B GPT in bf16, rounded: derived, only their ratios matter.
MESHES = {
    "pp8 tp8": (8, 1, 8),
    "pp8 cp4 tp8": (8, 4, 8),
    "pp16 tp4": (16, 1, 4),
    "pp4 tp2": (4, 1, 2),
    "tp1": (1, 1, 1),
}
SENT = {"pp": 3_200_000_000, "dp": 16_000_000_000, "cp": 9_000_000_000}


def measure_one(num_nodes: int, name: str) -> dict[str, Any]:
    """One planning, in this process."""
    pp, cp, tp = MESHES[name]
    mesh = Mesh.fill(num_nodes * 8, pp=pp, cp=cp, tp=tp)
    pods = -(-num_nodes * 5 // 4 // NODES_OF_A_POD)
    fabric = clos_fabric(f"clos:pods={pods},nodes={NODES_OF_A_POD},core_oversubscription=4,shuffle=1")
    names = sorted(random.Random(num_nodes).sample(sorted(fabric.nodes), num_nodes))
    allocation = make_allocation(names)
    traffic = [
        AxisTraffic("pp", "line", SENT["pp"] // 2, SENT["pp"] // 2),
        AxisTraffic("dp", "ring", SENT["dp"], 0),
        AxisTraffic("cp", "ring", SENT["cp"], 0),
    ]
    start, start_processor = time.perf_counter(), time.process_time()
    placement = place(mesh, allocation, fabric, traffic)
    placed, placed_processor = time.perf_counter(), time.process_time()
    GroupPlan(mesh).listing()
    listed = time.perf_counter()
    hops = {
        order: measure_traffic(place(mesh, allocation, fabric, traffic, order), fabric, traffic).byte_hops
        for order in ("slurm", "tp,cp,dp,pp", "tp,cp,pp,dp")
    }
    ours = measure_traffic(placement, fabric, traffic).byte_hops
    return {
        "place_s": placed - start,
        "place_processor_s": placed_processor - start_processor,
        "list_groups_s": listed - placed,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "byte_hops_ratio": {order: ours / other for order, other in hops.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("NODES", "MESH"))
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure_one(int(arguments.one[0]), arguments.one[1])))
        return
    found = {}
    for num_nodes in arguments.nodes:
        for name in MESHES:
            command = [sys.executable, "-m", "tests.bench.bench_placement", "--one", str(num_nodes), name]
            runs = [
                json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                for _ in range(arguments.repeat)
            ]
            medians = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "byte_hops_ratio"}
            found[f"{num_nodes} nodes, {name}"] = {**medians, "byte_hops_ratio": runs[0]["byte_hops_ratio"]}
    report: dict[str, Any] = {"load_average": os.getloadavg(), "medians": found}
    if len(arguments.nodes) == 2:
        small, large = arguments.nodes
        report["processor_time_ratio"] = {
            name: found[f"{large} nodes, {name}"]["place_processor_s"]
            / found[f"{small} nodes, {name}"]["place_processor_s"]
            for name in MESHES
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""Benchmarks once more as a rank on each of some nodes of a devcluster, whose interfaces are slow meanwhile."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.bench.on_ranks import on_ranks

ROOT = Path(__file__).resolve().parents[2]


def run_on_two(
    parser: argparse.ArgumentParser,
    rate: str,
    module: str,
    measure: Callable[..., Any],
    report: Callable[[Mapping[str, Any], list[Any]], Mapping[str, Any]],
) -> None:
    """A benchmark's whole main: `measure` on two ranks, here or on nodes of a devcluster, and its report as JSON.

    rate: of the nodes' interfaces where --rate gives none.
    """
    parser.add_argument("--cluster", help="name of a devcluster that runs")
    parser.add_argument("--rate", default=rate, help="of its nodes' interfaces, in tc's words")
    args = vars(parser.parse_args())
    cluster = args.pop("cluster")
    if cluster is not None:
        sys.exit(on_nodes(module, cluster, args, args["rate"]))
    results = on_ranks(measure, 2, args)
    if results is not None:
        print(json.dumps(report(args, results), indent=1))


def on_nodes(module: str, cluster: str, args: Mapping[str, Any], rate: str | None, num_nodes: int = 2) -> int:
    """Run a benchmark's module with these options on the cluster's first nodes; rank 0 prints.

    rate: of the interfaces, in tc's words, None to leave them; nodes are freed again whatever happens.

    Returns:
        The greater of the ranks' exit codes.
    """
    command = [sys.executable, str(ROOT / "slurm" / "devcluster")]

    def devcluster(*words: str) -> list[str]:
        return [*command, words[0], "--name", cluster, *words[1:]]

    status = json.loads(subprocess.run(devcluster("status", "--json"), check=True, capture_output=True).stdout)
    nodes = status["nodes"][:num_nodes]
    options = [word for name, value in args.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    ranks = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nodes are freed
    try:
        for node in nodes if rate else ():
            subprocess.run(devcluster("shape", node["name"], "--rate", rate), check=True)
        for rank, node in enumerate(nodes):
            environment = {
                "RANK": rank, "WORLD_SIZE": num_nodes, "MASTER_ADDR": nodes[0]["address"], "MASTER_PORT": 29517,
                "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT,
            }  # fmt: skip
            words = [f"{name}={value}" for name, value in environment.items()]
            program = [sys.executable, "-m", module, *options]
            ranks.append(
                subprocess.Popen([*devcluster("exec", "--host", node["name"]), "--", "env", *words, *program], cwd=ROOT)
            )
        return max(rank.wait() for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
        for node in nodes if rate else ():
            subprocess.run(devcluster("shape", node["name"], "--off"), check=True)

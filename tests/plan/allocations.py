"""Random fragmented allocations with the traffic of real models, and how a placement compares on them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.fabric import Fabric
from hpc_train.config import Config
from hpc_train.config_read import build_config
from hpc_train.plan.axis_bytes import AxisTraffic, axis_traffic
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.place import place
from hpc_train.plan.placement import Placement
from hpc_train.plan.traffic import measure_traffic
from tests.plan.fabrics import make_allocation, make_fabric

NODES = (16, 32, 64, 128, 256, 512)
# layers, hidden, heads of GPTs of 13B, 70B and 175B parameters (cited: their papers).
MODELS = {"13b": (40, 5120, 40), "70b": (80, 8192, 64), "175b": (96, 12288, 96)}
# pp, cp, tp; dp is what is left over.
MESHES = ((8, 1, 8), (4, 2, 8), (1, 4, 8), (2, 1, 8), (8, 1, 4), (4, 2, 4), (4, 1, 2))


def place_of(placement: Placement, rank: int) -> tuple[str, int]:
    """Node and slot of a rank."""
    return placement.nodes[placement.node_of_rank[rank]], int(placement.gpu_of_rank[rank])


@dataclass(frozen=True)
class Problem:
    """follows_switches: the nodes' names are in the order of the switches."""

    mesh: Mesh
    allocation: Allocation
    fabric: Fabric
    traffic: tuple[AxisTraffic, ...]
    follows_switches: bool
    core_oversubscription: float

    @property
    def num_nodes(self) -> int:
        return len(self.allocation.nodes)


def draw_problem(seed: int, nodes: Sequence[int] = NODES) -> Problem:
    """The problem of a seed: sizes in turn, all else drawn.

    A job gets runs of one to four neighbouring nodes that others have left free, anywhere in a fabric that is a quarter
    to three times larger than the job.
    """
    rng = random.Random(seed)
    num_nodes = nodes[seed % len(nodes)]
    follows_switches, over = rng.random() < 0.5, rng.choice([1.0, 4.0])
    pods = _draw_pods(rng, round(num_nodes * rng.uniform(1.25, 4)))
    total = sum(map(sum, pods))
    names = [f"n{index:05d}" for index in range(total)]
    if not follows_switches:
        rng.shuffle(names)
    fabric = make_fabric(pods, names, rails=8, core_oversubscription=over)
    allocation = make_allocation(sorted(_draw_nodes(rng, names, num_nodes)))
    pp, cp, tp = rng.choice(MESHES)
    mesh = Mesh.fill(num_nodes * 8, pp=pp, cp=cp, tp=tp)
    micro_batches = rng.choice([8, 16, 32])
    traffic = axis_traffic(_config(rng.choice([*MODELS]), micro_batches * mesh.dp), mesh)
    return Problem(mesh, allocation, fabric, traffic, follows_switches, over)


def compare(problem: Problem) -> dict[str, Any]:
    """Byte-hops of the plan over those of each known order; `sorted` is Slurm's numbering over sorted nodes."""
    hops = {}
    for order in ("auto", "slurm", "tp,cp,dp,pp", "tp,cp,pp,dp"):
        placed = place(problem.mesh, problem.allocation, problem.fabric, problem.traffic, order)
        hops[order] = measure_traffic(placed, problem.fabric, problem.traffic).byte_hops
    better = min(hops["tp,cp,dp,pp"], hops["tp,cp,pp,dp"])
    return {
        "nodes": problem.num_nodes,
        "mesh": problem.mesh.describe(),
        "core_oversubscription": problem.core_oversubscription,
        "follows_switches": problem.follows_switches,
        "byte_hops": hops,
        "to_slurm": hops["auto"] / hops["slurm"],
        "to_better_fixed": hops["auto"] / better,
        "sorted_to_slurm": hops["tp,cp,dp,pp"] / hops["slurm"],
    }


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The means that are promised, and how often a known order was better (it never may be)."""

    def mean(key: str, chosen: Sequence[dict[str, Any]]) -> float | None:
        return round(sum(entry[key] for entry in chosen) / len(chosen), 4) if chosen else None

    all_hops = [entry["byte_hops"] for entry in found]
    off = [entry for entry in found if not entry["follows_switches"]]
    few = [entry for entry in off if entry["nodes"] <= 32]
    many = [entry for entry in off if entry["nodes"] >= 128]
    return {
        "problems": len(found),
        "worse_than_a_known_order": sum(hops["auto"] > min(hops.values()) for hops in all_hops),
        "mean_to_better_fixed": mean("to_better_fixed", found),
        "mean_to_slurm_off_switches_16_to_32": mean("to_slurm", few),
        "mean_to_slurm_off_switches_128_and_more": mean("to_slurm", many),
        "mean_sorted_to_slurm_off_switches_16_to_32": mean("sorted_to_slurm", few),
        "mean_sorted_to_slurm_off_switches_128_and_more": mean("sorted_to_slurm", many),
    }  # fmt: skip


def _draw_pods(rng: random.Random, total: int) -> list[list[int]]:
    """Leaves of 16 or 32 nodes, four to eight a pod; smaller ones for small fabrics, so that three tiers are there."""
    leaf = min(rng.choice([16, 32]), max(4, total // 8))
    leaves = [leaf] * -(-total // leaf)
    width = rng.choice([4, 8])
    return [leaves[start : start + width] for start in range(0, len(leaves), width)]


def _draw_nodes(rng: random.Random, names: Sequence[str], num_nodes: int) -> list[str]:
    chosen: set[int] = set()
    while len(chosen) < num_nodes:
        start, run = rng.randrange(len(names)), rng.randint(1, 4)
        chosen.update([*range(start, min(start + run, len(names)))][: num_nodes - len(chosen)])
    return [names[index] for index in sorted(chosen)]


@lru_cache(maxsize=64)
def _config(model: str, global_batch_size: int) -> Config:
    layers, hidden, heads = MODELS[model]
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "vocab_size": 51200}
    tree = {
        "name": "quality",
        "model": {"family": "gpt", **sizes},
        "data": {"seq_len": 2048, "train": [{"prefix": "none"}]},
        "parallel": {"tp": 2, "sequence_parallel": True},
        "train": {"steps": 1, "global_batch_size": global_batch_size, "seed": 1, "precision": "bf16"},
        "optimizer": {"lr": 1e-4},
    }
    return build_config(tree, "quality")

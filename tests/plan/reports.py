"""Small configurations, allocations and reports of plans for tests."""

from __future__ import annotations

from typing import Any

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.fabric_clos import clos_fabric
from hpc_train.config import Config
from hpc_train.config_read import build_config
from hpc_train.plan.places import natural_key
from hpc_train.plan.report import PlanReport, report_plan

CLOS = "clos:pods=2,nodes=8,ports=8,gpus=8,core_oversubscription=2,shuffle=3"


def make_config(parallel: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "name": "small",
        "model": {"family": "llama", "num_layers": 8, "hidden_size": 64, "num_heads": 8, "vocab_size": 64},
        "parallel": parallel if parallel is not None else {"pp": 2, "tp": 4},
        "data": {"seq_len": 64, "train": [{"prefix": "x"}]},
        "train": {"steps": 1, "global_batch_size": 64},
        "optimizer": {"lr": 0.1},
    }
    return build_config({**tree, **sections}, "a test")


def make_allocation(nodes: list[str], tasks: int = 8) -> Allocation:
    counts = (tasks,) * len(nodes)
    return Allocation(tuple(nodes), counts, counts, "7", "a test")


def make_report(clos: str | None = CLOS, num_nodes: int = 8, config: Config | None = None) -> PlanReport:
    """A run on every second node by name, or on nodes of which nothing is known."""
    if clos is None:
        names, fabric = [f"n{index}" for index in range(num_nodes)], None
    else:
        fabric = clos_fabric(clos)
        names = sorted(fabric.nodes, key=natural_key)[: 2 * num_nodes : 2]
    return report_plan(config or make_config(), make_allocation(names), fabric)

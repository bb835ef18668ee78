"""What plans the batches of a run: planner, ranks and costs in one value, which also the node agents have.

It imports nothing of the configuration, which agents do without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from hpc_train.plan.batch_balanced import BalancedPlanner
from hpc_train.plan.batch_cost import BatchCosts, OffloadCosts
from hpc_train.plan.batch_naive import NaivePlanner
from hpc_train.plan.batch_problem import BatchPlanner, BatchProblem, HdpRanks
from hpc_train.plan.batch_static import StaticPlanner
from hpc_train.plan.batch_table import BatchTable


@final
@dataclass(frozen=True, eq=False)
class BatchSetup:
    """Makes the batch plan of any step from the lengths of its sequences, the same on every machine.

    planner: by its name. longest: tokens of a sequence at most. num_layers: of the ranks that have most; costs are of
    one of them. num_stages: of a pipeline, which has at least as many micro-batches, empty ones if need be.
    virtual_stages: model chunks a stage. With more than one, micro-batches go through them in groups that depend on
    their number; so all ranks then have equally many, and rings the same place in their members' lists. All pipelines
    have one list of actions, and no ring waits in a circle.
    """

    planner: str
    longest: int
    ranks: HdpRanks
    costs: BatchCosts
    num_layers: int
    num_stages: int = 1
    virtual_stages: int = 1

    def problem(self, step: int, lengths: Sequence[int]) -> BatchProblem:
        """Raises ConfigError: all ranks together cannot hold a sequence."""
        return BatchProblem.make(step, lengths, self.ranks, self.costs)

    def plan(self, step: int, lengths: Sequence[int]) -> BatchTable:
        """Who computes what of a step. Raises ConfigError: the ranks or the planner's rings cannot hold a sequence."""
        return self.plan_with(self.planner, self.problem(step, lengths))

    def plan_with(self, name: str, problem: BatchProblem) -> BatchTable:
        """The same with another planner."""
        table = self.planner_named(name).plan(problem)
        counts = np.maximum(table.num_micro_batches, self.num_stages)
        return replace(
            table, num_micro_batches=np.full_like(counts, counts.max()) if self.virtual_stages > 1 else counts
        )

    def planner_named(self, name: str) -> BatchPlanner:
        """static, with rings of one size, the least that holds the longest sequence; naive; or balanced."""
        if name == "static":
            return StaticPlanner(self.longest)
        if name == "naive":
            return NaivePlanner()
        assert name == "balanced", name
        has_one_chunk = self.num_stages == self.virtual_stages == 1
        if has_one_chunk:
            return BalancedPlanner(context=self.longest)
        return BalancedPlanner("pp", self.num_stages, context=self.longest)

    def to_json(self) -> dict[str, Any]:
        """For the node agents."""
        ranks = self.ranks
        arrays = {
            "capacity_tokens": ranks.capacity_tokens,
            "speed_milli": ranks.speed_milli,
            "order": ranks.order,
            "host": ranks.host,
            "port": ranks.port,
        }
        offload = self.costs.offload
        return {
            "planner": self.planner,
            "longest": self.longest,
            "ranks": {name: array.tolist() for name, array in arrays.items()},
            "costs": list(self.costs.numbers),
            "offload": None if offload is None else [offload.num_layers, offload.copy_per_token],
            "num_layers": self.num_layers,
            "num_stages": self.num_stages,
            "virtual_stages": self.virtual_stages,
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> BatchSetup:
        ranks = {name: np.array(values, np.int64) for name, values in document["ranks"].items()}
        offload = None if document["offload"] is None else OffloadCosts(*document["offload"])
        attention, linear, ring, step, constant, last_hop, home = document["costs"]
        costs = BatchCosts(
            attention, linear, ring, step, constant, offload, ring_last_hop_per_token=last_hop, ring_home_per_token=home
        )
        return BatchSetup(
            document["planner"],
            document["longest"],
            HdpRanks(**ranks),
            costs,
            document["num_layers"],
            document["num_stages"],
            document["virtual_stages"],
        )

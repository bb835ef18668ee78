"""What the table of ranks says beside the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.fabric import Fabric, FabricNode
from hpc_train.launch.rank_facts import distribution, rank_facts, slurm_procids
from hpc_train.launch.ranks import MpirunLauncher, SrunLauncher
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.run import RankFacts, plan_mesh

UNEVEN = Allocation(("n1", "n2", "n3"), (2, 1, 3), (0, 0, 0), "7", "a test")
SRUN = SrunLauncher(1, "pmix", False, 60)


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ([], None),
        (["--distribution=block"], "block"),
        (["-m", "cyclic:block"], "cyclic"),
        (["-mcyclic,nopack"], "cyclic"),
        (["--distribution", "arbitrary", "-w", "/tmp/hosts"], "arbitrary"),
        (["--distribution=cyclic", "--distribution=plane=2"], "plane"),
        (["--distribution=*:cyclic"], None),
        (["--mem=4G", "--distribution=Cyclic"], "cyclic"),
    ],
)
def test_the_last_distribution_of_sruns_options_counts(options: list[str], method: str | None) -> None:
    assert distribution(options) == method


def test_tasks_fill_node_after_node_or_go_round_the_nodes() -> None:
    places = [("n1", 0), ("n1", 1), ("n2", 0), ("n3", 0), ("n3", 1), ("n3", 2)]
    assert [*slurm_procids(UNEVEN, [])] == places
    cyclic = [("n1", 0), ("n2", 0), ("n3", 0), ("n1", 1), ("n3", 1), ("n3", 2)]
    assert slurm_procids(UNEVEN, ["--distribution=cyclic"]) == {place: index for index, place in enumerate(cyclic)}
    assert slurm_procids(UNEVEN, ["--distribution=arbitrary"]) == {}


def test_rail_and_card_are_told_only_where_they_are_known() -> None:
    plan = plan_mesh(Mesh.fill(6), UNEVEN)
    nodes = {name: FabricNode(name, ("l",), rail_of_gpu=(1, 0, 2)) for name in UNEVEN.nodes}
    fabric = Fabric(nodes, {"l": "p"}, {}, "a test", are_rails_known=True, rail_nics=("mlx5_0", "mlx5_3"))
    facts = rank_facts(plan, UNEVEN, fabric, SRUN)
    assert facts[0] == RankFacts("mlx5_3", 1, 0)
    assert facts[5] == RankFacts(None, 2, 5)
    assumed = rank_facts(plan, UNEVEN, replace(fabric, are_rails_known=False), SRUN)
    assert assumed[0] == RankFacts(None, None, 0)


def test_mpirun_gives_no_number_of_slurms() -> None:
    plan = plan_mesh(Mesh.fill(6), UNEVEN)
    assert set(rank_facts(plan, UNEVEN, None, MpirunLauncher("mpirun", ()))) == {RankFacts()}

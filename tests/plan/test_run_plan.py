from __future__ import annotations

import json

import pytest

from hpc_train.cluster.allocation import Allocation
from hpc_train.config import Config
from hpc_train.config_read import build_config
from hpc_train.errors import ConfigError, LaunchError
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.run import RANKS_TSV_COLUMNS, Plan, RankFacts, plan_mesh, world_mesh
from tests.plan.reports import make_report


def allocation(*tasks: int) -> Allocation:
    nodes = tuple(f"n{index + 1}" for index in range(len(tasks)))
    return Allocation(nodes=nodes, tasks_per_node=tasks, gpus_per_node=(0,) * len(tasks), job_id="7", source="a test")


def config(**parallel: int) -> Config:
    return build_config(
        {
            "name": "a",
            "model": {"family": "gpt", "num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 16},
            "parallel": parallel,
            "data": {"seq_len": 8, "train": [{"prefix": "x"}]},
            "train": {"steps": 1, "global_batch_size": 4},
            "optimizer": {"lr": 0.1},
        },
        "a test",
    )


def test_ranks_run_through_the_nodes_in_order_however_many_tasks_each_has() -> None:
    plan = plan_mesh(world_mesh(config(), allocation(4, 1, 2)), allocation(4, 1, 2))
    assert [(planned.node, planned.gpu) for planned in plan.ranks] == [
        ("n1", 0), ("n1", 1), ("n1", 2), ("n1", 3), ("n2", 0), ("n3", 0), ("n3", 1),
    ]  # fmt: skip
    assert plan.mesh == Mesh(pp=1, dp=7, cp=1, tp=1)
    assert plan.lookup("n3", 1) == 6


def test_a_plan_survives_its_file_and_keeps_its_hash() -> None:
    plan = plan_mesh(Mesh(pp=2, dp=2, cp=1, tp=2), allocation(4, 4))
    read = Plan.from_json(plan.to_json())
    assert read == plan
    assert read.hash == plan.hash == json.loads(plan.to_json())["hash"]
    document = json.loads(plan.to_json())
    assert list(document["axes"].items()) == [("pp", 2), ("dp", 2), ("cp", 1), ("tp", 2)]
    assert document["groups"]["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert document["ranks"][5] == {
        "rank": 5, "node": "n2", "gpu": 1, "coords": {"pp": 1, "dp": 0, "cp": 0, "tp": 1},
    }  # fmt: skip


def test_two_plans_that_differ_in_one_place_have_different_hashes() -> None:
    """FC-56"""
    mesh = Mesh(pp=1, dp=4, cp=1, tp=1)
    assert plan_mesh(mesh, allocation(2, 2)).hash != plan_mesh(mesh, allocation(3, 1)).hash


def test_a_changed_or_cut_plan_file_is_refused() -> None:
    text = plan_mesh(Mesh(pp=1, dp=2, cp=1, tp=1), allocation(2)).to_json()
    with pytest.raises(LaunchError, match="was changed or is incomplete"):
        Plan.from_json(text.replace('"gpu": 1', '"gpu": 2'))
    for broken, said in (
        (text[:-20], "Unterminated string"), ("[]", "a list, and not a JSON object"), ("{}", "lacks the key 'version'"),
        (text.replace('"world_size": 2', '"world_size": "2"'), "its key 'world_size' is text, and not a whole number"),
        (text.replace('"gpu": 1', '"slot": 1'), "lacks the key 'gpu'"),
    ):  # fmt: skip
        with pytest.raises(LaunchError, match=rf"not a plan\.json: .*{said}.*Let `hpc-train run` write a new one"):
            Plan.from_json(broken)


def test_axes_and_entries_of_later_versions_are_read_and_kept() -> None:
    plan = plan_mesh(Mesh(pp=1, dp=2, cp=1, tp=1), allocation(2))
    later = Plan(plan.mesh, plan.ranks, plan.groups, 2, {"ep": 2}, {"estimate": {"mfu": 0.5}})
    read = Plan.from_json(later.to_json())
    assert read == later
    assert json.loads(read.to_json())["axes"] == {"pp": 1, "dp": 2, "cp": 1, "tp": 1, "ep": 2}


@pytest.mark.parametrize(
    ("node", "gpu", "words"),
    [("n2", 2, "slot 2 of node n2: on n2 the plan has only slots 0-1"), ("n9", 0, "no node of that name")],
)
def test_a_place_that_was_not_planned_is_refused_by_its_name(node: str, gpu: int, words: str) -> None:
    plan = plan_mesh(Mesh(pp=1, dp=4, cp=1, tp=1), allocation(2, 2))
    with pytest.raises(LaunchError, match=words):
        plan.lookup(node, gpu)


def test_the_table_of_ranks_has_the_columns_that_others_rely_on() -> None:
    plan = plan_mesh(Mesh(pp=1, dp=2, cp=1, tp=2), allocation(2, 2))
    facts = [RankFacts("mlx5_1", 1, procid) for procid in (0, 2, 1, 3)]
    rows = [line.split("\t") for line in plan.ranks_tsv(facts).splitlines()]
    assert tuple(rows[0]) == RANKS_TSV_COLUMNS
    assert rows[4] == ["3", "n2", "1", "1", "1", "mlx5_1", "1", "3", "0", "1", "0", "1"]
    assert plan.ranks_tsv().splitlines()[4].split("\t")[5:8] == ["-", "-", "-"]


def test_a_mesh_that_does_not_fill_the_allocation_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 ranks do not fill"):
        world_mesh(config(dp=2), allocation(2, 1))


def test_16384_ranks_are_planned_written_and_read() -> None:
    tasks = allocation(*(8,) * 2048)
    plan = plan_mesh(Mesh.fill(16384, pp=16, tp=8), tasks)
    read = Plan.from_json(plan.to_json())
    assert read.lookup("n2048", 7) == 16383
    assert plan.ranks_tsv().count("\n") == 16385
    assert read.groups == {}


def test_a_checkpoint_s_part_of_the_plan_says_who_was_where() -> None:
    plan = make_report().plan
    seats = json.loads(json.dumps(plan.seats()))
    assert (seats["hash"], seats["axes"]) == (plan.hash, {"pp": 2, "dp": 8, "cp": 1, "tp": 4})
    places = zip(seats["node_of_rank"], seats["gpu_of_rank"], strict=True)
    assert [(seats["nodes"][node], gpu) for node, gpu in places] == [(rank.node, rank.gpu) for rank in plan.ranks]

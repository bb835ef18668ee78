"""What a refusal advises has passed the checks that refused: following it once is enough."""

from __future__ import annotations

import pytest

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.fabric_clos import clos_fabric
from hpc_train.config_read import load_config
from hpc_train.errors import ConfigError
from hpc_train.launch.checks import check_plan, check_ranks
from hpc_train.plan.advice import with_change
from hpc_train.plan.changes import Change
from hpc_train.plan.report import report_plan
from tests.plan.drawn_shapes import Shape, advised, allocation_of, followed

HDP = ("train.micro_batch_size=1", "parallel.hdp.capacity_tokens=128", "data.seq_len=5000")
BROKEN = [
    ("llama-7b-2m", 16, 8, ()),
    ("llama-7b-256k", 128, 7, ()),
    ("llama-7b-256k", 128, 8, ("parallel.hdp.capacity_tokens=8191",)),
    ("llama-7b-256k", 128, 8, ("parallel.hdp.offload=true",)),
    ("llama-7b", 1, 8, ("fabric.gpu_memory_bytes=40000000000",)),
    ("gpt-175b", 64, 8, ("parallel.pp=2", "fabric.gpu_memory_bytes=80000000000")),
    ("tiny", 1, 2, HDP),
    ("tiny", 1, 2, (*HDP, "parallel.hdp.offload=true")),
    ("tiny", 1, 2, (*HDP, "parallel.hdp.planner=static")),
    ("tiny", 1, 2, (*HDP, "parallel.hdp.planner=static", "parallel.hdp.offload=true", "data.seq_len=200")),
    ("tiny", 1, 2, (*HDP, "parallel.hdp.capacity_tokens=64")),
    ("tiny", 1, 4, (*HDP, "parallel.pp=2", "parallel.virtual_stages=2", "parallel.hdp.offload=true")),
    ("tiny", 1, 3, ("parallel.tp=2",)),
    ("tiny", 1, 6, ("parallel.tp=3",)),
    ("tiny", 1, 4, ("parallel.dp=3",)),
    ("tiny", 1, 4, ("parallel.dp=2", "parallel.tp=3")),
    ("tiny", 2, 3, ("parallel.tp=2", "parallel.sequence_parallel=true")),
    ("tiny", 1, 7, ("train.global_batch_size=8", "train.micro_batch_size=8")),
    ("tiny", 1, 4, ("parallel.tp=3", "train.global_batch_size=24", "train.micro_batch_size=5")),
    ("tiny", 1, 2, ("train.global_batch_size=24", "train.micro_batch_size=5")),
    ("tiny", 1, 6, ("parallel.pp=6",)),
    ("tiny", 1, 2, ("parallel.pp=2", "parallel.virtual_stages=8")),
    ("tiny", 1, 2, ("parallel.pp=2", "parallel.layers_per_stage=[1,1]")),
    ("tiny", 1, 4, ("parallel.pp=4", "train.global_batch_size=2", "train.micro_batch_size=1")),
    ("tiny", 1, 2, ("parallel.tp=2", "parallel.sequence_parallel=true", "data.seq_len=255")),
    ("tiny", 1, 2, ("parallel.tp=2", "parallel.tp_tiles=7")),
    ("tiny", 1, 1, ("parallel.gradient_wire=bf16",)),
    ("tiny", 1, 1, ("parallel.overlap=false",)),
    ("tiny", 1, 1, ("parallel.early_updates=true", "parallel.virtual_stages=4")),
]


@pytest.mark.parametrize(("recipe", "num_nodes", "per_node", "words"), BROKEN)
def test_each_advice_is_accepted_when_it_is_followed(
    recipe: str, num_nodes: int, per_node: int, words: tuple[str, ...]
) -> None:
    allocation = allocation_of(num_nodes, per_node)
    with pytest.raises(ConfigError) as caught:
        check_plan(load_config(recipe, words), allocation, None)
    changes = advised(str(caught.value))
    assert changes
    for change in changes:
        shape = followed(Shape(words, allocation), change)
        config = load_config(recipe, shape.words)
        check_plan(config, shape.allocation, None)
        if recipe == "tiny":
            report_plan(config, shape.allocation, None)


@pytest.mark.parametrize("num_nodes", [1, 7])
def test_too_few_ranks_for_a_recipe_are_told_how_many_its_own_mesh_needs(num_nodes: int) -> None:
    """Not a smaller tp, with which the model does not fit into a GPU."""
    with pytest.raises(ConfigError, match="do not fill a mesh") as caught:
        check_plan(load_config("llama-70b-256k"), allocation_of(num_nodes, 8), None)
    assert advised(str(caught.value)) == [Change({}, 1024)]


def test_advice_of_a_refusal_that_no_change_mends_is_kept() -> None:
    counts = (8,) * 15 + (4,) * 2
    unlike = Allocation(tuple(f"n{number}" for number in range(17)), counts, counts, None, "a test")
    config = load_config("gpt-175b", ("parallel.pp=2", "fabric.gpu_memory_bytes=8000000000"))
    for allocation, says in ((unlike, "with train.recompute=full"), (allocation_of(16, 8), "with 256 ranks")):
        with pytest.raises(ConfigError, match=says) as caught:
            check_plan(config, allocation, None)
        told = str(caught.value).lower()
        assert told.rstrip(".").endswith("use more ranks, a smaller train.micro_batch_size or data.seq_len")


def test_what_a_fabric_has_no_room_for_is_not_advised() -> None:
    """Nodes of 4 GPUs hold no tp group of 8, and there is no further node for more ranks."""
    fabric = clos_fabric("clos:pods=1,nodes=4,gpus=4")
    names = tuple(fabric.nodes)
    allocation = Allocation(names, (4,) * 4, (4,) * 4, None, "a test")
    config = load_config("llama-7b", ("parallel.tp=8",))
    with pytest.raises(ConfigError, match="does not fit into a node") as caught:
        check_plan(config, allocation, fabric)
    assert {change.settings["parallel.tp"] for change in advised(str(caught.value))} <= {"1", "2", "4"}
    short = Allocation(names[:3], (4,) * 3, (4,) * 3, None, "a test")
    for others, says in ((names[3:], True), ((), False)):
        with pytest.raises(ConfigError, match="do not fill a mesh") as caught:
            check_plan(load_config("llama-7b", ("parallel.dp=8",)), short, fabric, others=others)
        assert ("16 ranks" in str(caught.value).partition(" Use ")[2]) == says


def test_where_nothing_near_by_passes_the_refusal_says_why() -> None:
    config = load_config("tiny", (*HDP, "parallel.tp=3", "parallel.hdp.profile=none.json"))
    with pytest.raises(
        ConfigError, match=r"No change near by .* with parallel\.tp=\d parallel\.hdp\.profile=none\.json"
    ):
        check_ranks(config, 12)


def test_a_change_takes_along_what_would_have_no_effect() -> None:
    config = load_config("tiny", ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.tp_tiles=2"))
    assert with_change(config, Change({"parallel.tp": 1})) is None
    with pytest.raises(ConfigError, match=r"parallel\.tp=1 parallel\.sequence_parallel=false parallel\.tp_tiles=1"):
        check_ranks(config, 3)

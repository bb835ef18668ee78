"""Recipes of published models: their sizes, and that they fit the machines that they are for."""

from __future__ import annotations

import pytest

from hpc_train.cli import main
from hpc_train.config_read import load_config
from hpc_train.errors import ConfigError, DataError
from hpc_train.launch.checks import check_data_files, check_sizes
from hpc_train.plan.cost import flops_per_token
from hpc_train.plan.memory import check_memory
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.parameters import num_parameters
from hpc_train.plan.stages import plan_stages

# Parameters in billions as their authors give them, and the smallest world that each should fit on GPUs of 80 GB.
PUBLISHED = {
    "gpt-175b": (175.0, 1024), "gpt-530b": (530.0, 2240), "llama-7b": (6.7, 16), "llama-13b": (13.0, 32),
    "llama-30b": (32.5, 64), "llama-70b": (69.0, 128),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_published_size_and_fits(name: str) -> None:
    config = load_config(name)
    billions, world_size = PUBLISHED[name]
    assert num_parameters(config.model, config.data.seq_len) / 1e9 == pytest.approx(billions, rel=0.01)
    mesh = Mesh.fill(world_size, pp=config.parallel.pp, tp=config.parallel.tp)
    check_memory(config, mesh, 80 * 10**9)
    with pytest.raises(DataError, match=r"your-corpus\.bin: no such file(\n.*)+data\.train\.0\.prefix=PREFIX"):
        check_data_files(config)


@pytest.mark.parametrize(("name", "pp", "chunks", "layers"), [("gpt-175b", 8, 6, 2), ("gpt-530b", 35, 3, 1)])
def test_megascale_s_models_have_its_table_s_shape(name: str, pp: int, chunks: int, layers: int) -> None:
    config = load_config(name)
    stages = plan_stages(config, config.train.recompute)
    assert [len(stage) for stage in stages] == [layers] * (pp * chunks)
    assert (config.parallel.pp, config.parallel.tp, config.parallel.virtual_stages) == (pp, 8, chunks)


def test_gpt_175b_costs_what_its_published_runs_counted() -> None:
    """Megatron-LM's rows: MFU times peak and GPUs, over tokens a second."""
    config = load_config("gpt-175b")
    counted = flops_per_token(config.model, config.data.seq_len)
    assert counted == pytest.approx(0.53 * 256 * 312e12 / 39300, rel=0.004)
    assert counted == pytest.approx(0.433 * 8192 * 312e12 / 1027900, rel=0.004)


CONTEXTS = ("256k", "512k", "1m", "2m")
LONG = [f"llama-{size}-{context}" for size in ("7b", "13b", "30b", "70b") for context in CONTEXTS]


@pytest.mark.parametrize("name", LONG)
def test_a_long_recipe_fits_the_machines_that_it_is_for(name: str) -> None:
    """256 hdp ranks, which hold 2M tokens; 32M tokens a step; fewer ranks than its context needs are refused."""
    config = load_config(name)
    parallel, hdp = config.parallel, config.parallel.hdp
    assert hdp is not None and config.train.global_batch_size * config.data.seq_len == 32 << 20
    published = load_config(name.rpartition("-")[0]).model
    changed = {"num_kv_heads": config.model.num_kv_heads, "rope_theta": config.model.rope_theta}
    assert config.model == published.model_copy(update=changed)
    mesh = Mesh(parallel.pp, 256, 1, parallel.tp)
    check_sizes(config, mesh)
    check_memory(config, mesh, 80 * 10**9)
    needed = config.data.seq_len // hdp.capacity_tokens
    with pytest.raises(ConfigError, match=f"Use {needed * parallel.pp * parallel.tp} ranks"):
        check_sizes(config, Mesh(parallel.pp, needed - 1, 1, parallel.tp))


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_a_long_recipe_is_accepted_by_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parallel = load_config(name).parallel
    nodes = 256 * parallel.pp * parallel.tp // 8
    assert main(["plan", name, "-N", str(nodes), "--fabric", f"clos:pods=8,nodes={nodes // 8}"]) == 0
    assert "see `hpc-train plan --batch STEP`" in capsys.readouterr().out

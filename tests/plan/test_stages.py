"""Layers over stages: the best split by brute force, published shapes, and what is refused."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.config import Config, ModelConfig
from hpc_train.config_read import build_config
from hpc_train.errors import ConfigError
from hpc_train.plan.cost import flops_per_token
from hpc_train.plan.stages import LOSS_FLOPS_PER_LOGIT, model_costs, plan_stages, split_layers

small_costs = st.lists(st.integers(0, 9), min_size=1, max_size=8)
extras = st.integers(0, 20)


def _stage_costs(stages, costs, first_extra, last_extra):
    loads = [sum(costs[layer] for layer in stage) for stage in stages]
    loads[0] += first_extra
    loads[-1] += last_extra
    return loads


@given(small_costs, extras, extras, st.data())
def test_no_other_split_has_a_cheaper_slowest_stage_or_is_more_even(costs, first_extra, last_extra, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    found = split_layers(costs, first_extra, last_extra, num_stages)
    assert [layer for stage in found for layer in stage] == list(range(len(costs)))
    assert len(found) == num_stages and min(map(len, found)) >= 1

    def badness(stages):
        loads = _stage_costs(stages, costs, first_extra, last_extra)
        return max(loads), sum(load**2 for load in loads), [len(stage) for stage in stages]

    every = [
        [range(start, stop) for start, stop in pairwise((0, *cuts, len(costs)))]
        for cuts in combinations(range(1, len(costs)), num_stages - 1)
    ]
    assert badness(found) == min(map(badness, every))


def test_the_head_counts_as_layers_of_the_last_stage():
    assert list(map(len, split_layers([10] * 4, 0, 20, 2))) == [3, 1]
    # Llama 3's 126 layers on 16 stages: 405B took a layer off the ends by hand.
    assert list(map(len, split_layers([10] * 126, 0, 11, 16))) == [8] * 15 + [6]


def test_ties_give_the_first_stages_fewer_layers():
    assert list(map(len, split_layers([1] * 10, 0, 0, 4))) == [2, 2, 3, 3]


@pytest.mark.parametrize("num_stages", [3, 200])
def test_more_stages_than_layers_are_refused_with_the_nearest_number(num_stages):
    with pytest.raises(ConfigError, match=r"parallel.pp=\d+ .* model.num_layers=2.* Use parallel.pp=2 or less"):
        split_layers([1, 1], 0, 0, num_stages)


def test_a_cost_below_nothing_is_refused():
    with pytest.raises(ValueError, match="0 or more"):
        split_layers([1, -1], 0, 0, 2)


MODEL = ModelConfig(
    family="llama", num_layers=5, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_hidden_size=192, vocab_size=512
)


@pytest.mark.parametrize(("seq_len", "micro_batch_size"), [(32, 1), (4096, 3)])
def test_costs_add_up_to_the_models_floating_point_operations_and_the_loss(seq_len, micro_batch_size):
    costs = model_costs(MODEL, seq_len, micro_batch_size)
    tokens = seq_len * micro_batch_size
    loss = LOSS_FLOPS_PER_LOGIT * tokens * MODEL.vocab_size
    assert sum(costs.layers) + costs.embedding + costs.head_and_loss - loss == tokens * flops_per_token(MODEL, seq_len)


def test_recomputation_makes_layers_dearer_and_leaves_the_head():
    plain, selective, full = (model_costs(MODEL, 1024, recompute=how) for how in ("none", "selective", "full"))
    assert plain.head_and_loss == selective.head_and_loss == full.head_and_loss
    assert plain.layers[0] < selective.layers[0] < full.layers[0]
    assert full.layers[0] * 3 == plain.layers[0] * 4


def test_layers_with_a_window_are_cheaper_and_stages_are_cut_accordingly():
    windowed = MODEL.model_copy(update={"attention_window": (64, 64, 64, None, None)})
    costs = model_costs(windowed, 4096)
    full, window = costs.layers[-1], costs.layers[0]
    assert costs.layers == (window,) * 3 + (full,) * 2
    assert full - window == 4096 * 12 * MODEL.hidden_size * (4096 - 64)
    assert list(map(len, split_layers(costs.layers, 0, 0, 2))) == [4, 1]
    tokens = 4096
    loss = LOSS_FLOPS_PER_LOGIT * tokens * MODEL.vocab_size
    assert sum(costs.layers) + costs.head_and_loss - loss == tokens * flops_per_token(windowed, 4096)


def _config(**parallel) -> Config:
    return build_config(
        {
            "name": "run",
            "model": MODEL.model_dump(),
            "parallel": parallel,
            "data": {"seq_len": 32, "train": [{"prefix": "corpus"}]},
            "train": {"steps": 1, "global_batch_size": 4},
            "optimizer": {"lr": 0.001},
        },
        "test",
    )


def test_a_run_of_one_stage_holds_all_layers():
    assert plan_stages(_config()) == (range(0, 5),)


def test_layers_that_the_user_gave_are_taken_and_must_add_up():
    assert plan_stages(_config(layers_per_stage=[5])) == (range(0, 5),)
    with pytest.raises(ConfigError, match=r"layers_per_stage=\[4\] adds up to 4 layers, and model.num_layers=5"):
        plan_stages(_config(layers_per_stage=[4]))


def test_layers_per_stage_need_a_number_for_each_stage():
    with pytest.raises(ConfigError, match=r"layers_per_stage has 2 numbers and parallel.pp=1 stages"):
        _config(layers_per_stage=[3, 2])
    with pytest.raises(ConfigError, match="layers_per_stage"):
        _config(layers_per_stage=[0])


def test_virtual_stages_have_a_range_each_in_the_model_s_order():
    ranges = plan_stages(_config(pp=2, virtual_stages=2))
    assert [layer for part in ranges for layer in part] == list(range(5))
    assert len(ranges) == 4
    # The head counts, so the last chunk has no more layers than another.
    assert len(ranges[-1]) == 1
    assert plan_stages(_config(pp=2, virtual_stages=2, layers_per_stage=[1, 1, 2, 1]))[2] == range(2, 4)
    with pytest.raises(
        ConfigError, match=r"virtual_stages=3 on parallel.pp=2 .* needs 6 layers.* Use virtual_stages=2"
    ):
        plan_stages(_config(pp=2, virtual_stages=3))
    with pytest.raises(ConfigError, match=r"has 2 numbers and parallel.pp=2 stages of parallel.virtual_stages=2 each"):
        _config(pp=2, virtual_stages=2, layers_per_stage=[3, 2])


def test_zero_bubble_without_a_pipeline_is_refused():
    with pytest.raises(ConfigError, match="schedule=zero_bubble has no effect with pp=1"):
        _config(schedule="zero_bubble")

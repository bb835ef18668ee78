"""Weights of the right shapes that were trained as another model are refused; what is changed on purpose is not."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_train.checkpoint.format.model_function import CHANGEABLE, require_function
from hpc_train.checkpoint.format.model_tensors import ModelSpec, model_tensors
from hpc_train.checkpoint.stores.location import locate
from hpc_train.config import CheckpointConfig, ModelConfig
from hpc_train.errors import CheckpointError, ConfigError

PLACE = locate("runs/a/checkpoints/step_0000006")


def _spec(seq_len: int = 64, **changes: Any) -> ModelSpec:
    sizes = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 61}
    return ModelSpec(ModelConfig(**{"family": "llama", **sizes, **changes}), seq_len)


@pytest.mark.parametrize(
    ("there", "here", "told"),
    [
        ({}, {"num_heads": 2, "num_kv_heads": 1}, ["num_heads is 4 there and 2 here", "num_kv_heads is 2 there and 1"]),
        ({}, {"rope_theta": 5e5}, ["rope_theta is 10000.0 there and 500000.0 here"]),
        ({}, {"norm_eps": 1e-6}, ["norm_eps is 1e-05 there and 1e-06 here"]),
        ({"attention_window": 16}, {}, ["window is 16 there and none here in layer 0, and 2 more layers differ"]),
        ({}, {"attention_window": [None, 8, None]}, ["attention_window is none there and 8 here in layer 1"]),
    ],
)
def test_what_shapes_do_not_tell_is_refused_by_its_names(
    there: dict[str, Any], here: dict[str, Any], told: list[str]
) -> None:
    found, wanted = _spec(**there), _spec(**here)
    assert model_tensors(found) == model_tensors(wanted)
    with pytest.raises(CheckpointError) as refused:
        require_function(PLACE, found, wanted, ())
    assert all(words in str(refused.value) for words in told)
    names = [name for name in here or there if name in CHANGEABLE]
    if names:
        assert f"checkpoint.allow_changed_model=[{names[0]}]" in str(refused.value)
        (allowed,) = require_function(PLACE, found, wanted, names)
        assert told[0] in allowed
        with pytest.raises(CheckpointError, match="were trained as another model"):
            require_function(PLACE, found, wanted, [name for name in CHANGEABLE if name not in names])


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({}, {"dropout": 0.1, "init_std": 0.5}),
        ({}, {"seq_len": 4096}),
        ({"num_kv_heads": None}, {"num_kv_heads": 4}),
        ({"attention_window": 64}, {}),  # as long as the longest sequence: none
        ({"attention_window": 4096}, {"attention_window": [100, None, 64]}),
        ({"family": "gpt", "num_kv_heads": None}, {"family": "gpt", "num_kv_heads": None, "rope_theta": 7.0}),
    ],
)
def test_what_changes_nothing_that_was_learnt_is_not_asked_about(there: dict[str, Any], here: dict[str, Any]) -> None:
    assert require_function(PLACE, _spec(**there), _spec(**here), ()) == []


def test_what_weights_can_never_follow_cannot_be_allowed() -> None:
    with pytest.raises((ConfigError, ValueError), match="allow_changed_model"):
        CheckpointConfig(allow_changed_model=["num_heads"])

"""Profiles: what they are of, what they refuse, and the whole numbers that planners get of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config import Config
from hpc_train.errors import ConfigError
from hpc_train.plan.batch_cost import TICK_S
from hpc_train.plan.batch_profile import (
    Profile,
    derived_profile,
    load_profile,
    passed_bytes,
    profile_key,
    profile_of,
)
from hpc_train.plan.mesh import Mesh
from tests.plan.reports import make_config

MESH = Mesh(pp=1, dp=8, cp=1, tp=2)


def hdp_config(**changes: Any) -> Config:
    model = {
        "family": "llama", "num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8,
        "ffn_hidden_size": 11008, "vocab_size": 32000, **changes.pop("model", {}),
    }  # fmt: skip
    hdp = {"capacity_tokens": 8192, **changes.pop("hdp", {})}
    train = {"steps": 1, "global_batch_size": 4, "precision": "bf16", "recompute": "selective"}
    parallel = {"tp": 2, "hdp": hdp, **changes.pop("parallel", {})}
    data = {"seq_len": 65536, "train": [{"prefix": "x"}]}
    return make_config(parallel, model=model, train={**train, **changes.pop("train", {})}, data=data)


def measured(config: Config | None = None, **changes: Any) -> Profile:
    values: dict[str, Any] = {
        "model": profile_key(config or hdp_config(), MESH), "attention_s_per_square": 9.21e-12,
        "linear_s_per_token": 3.5e-7, "micro_batch_s": 1e-5, "ring_s_per_byte": 9e-11, "ring_s_per_step": 0.0,
        "copy_s_per_byte": 4e-11, "origin": "a test",
    }  # fmt: skip
    return Profile(**{**values, **changes})


TIMES = ("attention_s_per_square", "linear_s_per_token", "micro_batch_s", "ring_s_per_byte", "copy_s_per_byte")


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-9, "fast", None, True])
def test_values_that_are_no_times_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}.*finite numbers above 0. Measure again"):
        measured(**{name: value})


@pytest.mark.parametrize("name", ["attention_s_per_square", "linear_s_per_token", "ring_s_per_byte"])
def test_what_grows_takes_time(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0.0"):
        measured(**{name: 0.0})
    assert measured(micro_batch_s=0.0, ring_s_per_step=0.0).micro_batch_s == 0.0


@pytest.mark.parametrize("speed", [math.nan, 0.0, -1.0])
def test_speeds_are_above_zero(speed: float) -> None:
    with pytest.raises(ConfigError, match=r"speeds\.n3="):
        measured(speeds={"n3": speed})


def test_a_file_gives_the_same_profile_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    path, profile = tmp_path / "costs.json", measured(speeds={"n1": 0.5})
    path.write_text(profile.to_json())
    assert load_profile(str(path)) == profile and load_profile(str(path)).hash == profile.hash
    changed = json.loads(path.read_text())
    changed["linear_s_per_token"] *= 2
    path.write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match=r"states the hash .* but its content has"):
        load_profile(str(path))
    for key, value in (("linear_s_per_token", math.nan), ("copy_s_per_byte", "fast"), ("speeds", {"n3": 0})):
        path.write_text(json.dumps({**changed, key: value}))
        with pytest.raises(ConfigError, match=rf"^{path}: the profile \(a test\) has .*{key}.*; times and speeds"):
            load_profile(str(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "is not a profile"), ("[]", "is not a profile"), ('{"version": 2, "hash": "x"}', "is not a profile"),
     ('{"version": 9, "hash": "x"}', "is a profile of version 9; this program reads 2")],
)  # fmt: skip
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"costs.json {said}"):
        load_profile(str(path))
    with pytest.raises(ConfigError, match=r"parallel.hdp.profile=.*none.json cannot be read"):
        profile_of(hdp_config(hdp={"profile": str(tmp_path / "none.json")}), MESH)


def test_a_profile_of_another_model_is_refused() -> None:
    profile = measured()
    with pytest.raises(ConfigError, match=r"hidden_size 4096 and not 512.*Measure this model"):
        profile.costs(hdp_config(model={"hidden_size": 512}), MESH)
    with pytest.raises(ConfigError, match="tp 2 and not 4"):
        profile.costs(hdp_config(parallel={"tp": 4}), Mesh(pp=1, dp=4, cp=1, tp=4))
    with pytest.raises(ConfigError, match="tp_tiles 1 and not 2"):
        profile.costs(hdp_config(parallel={"tp_tiles": 2}), MESH)


def test_costs_are_whole_ticks_of_the_times() -> None:
    costs = measured().costs(hdp_config(), MESH)
    assert all(isinstance(number, int) for number in costs.numbers)
    assert costs.attention_per_square == round(9.21e-12 / TICK_S)
    assert costs.linear_per_token == round(3.5e-7 / TICK_S)
    # 4 of 8 groups of 128 numbers, keys and values; forward, again, backward in 2 bytes, and gradients in 4.
    assert costs.ring_per_token == pytest.approx(9e-11 * 2 * 4 * 128 * (3 * 2 + 4) / TICK_S, abs=1)
    assert costs.ring_last_hop_per_token == costs.ring_per_token
    assert costs.ring_home_per_token == pytest.approx(9e-11 * 2 * 4 * 128 * 4 / TICK_S, abs=1)
    assert costs.offload is None
    offload = measured().costs(hdp_config(hdp={"offload": True}), MESH).offload
    assert offload is not None and offload.num_layers == 32 and offload.copy_per_token > 0


@pytest.mark.parametrize(
    ("precision", "recompute", "num_bytes", "num_transfers"),
    [("bf16", "none", 2 * 2 + 4, 2), ("bf16", "full", 3 * 2 + 4, 3), ("fp32", "none", 3 * 4, 2),
     ("fp32", "selective", 4 * 4, 3)],
)  # fmt: skip
def test_gradients_go_round_in_fp32_and_a_ring_s_latency_is_that_of_all_its_transfers(
    precision: str, recompute: str, num_bytes: int, num_transfers: int
) -> None:
    """As `test_the_next_keys_and_values_travel_beside_the_present_block` counts them in real rings."""
    config = hdp_config(train={"precision": precision, "recompute": recompute})
    passed = passed_bytes(config, MESH)
    assert passed.once_round == 2 * 4 * 128 * num_bytes and passed.gradient == 2 * 4 * 128 * 4
    costs = measured(config, ring_s_per_step=1e-6).costs(config, MESH)
    assert costs.ring_per_step == round(num_transfers * 1e-6 / TICK_S)


def test_a_window_turns_attention_into_time_by_tokens() -> None:
    """Half of the layers see 256 tokens: as much as half of a sequence of 512 sees at full attention."""
    windows = [None, 256] * 16
    config = hdp_config(model={"attention_window": windows})
    whole, half = measured().costs(hdp_config(), MESH), measured().costs(config, MESH)
    assert half.attention_per_square == pytest.approx(whole.attention_per_square / 2, abs=1)
    added = half.linear_per_token - whole.linear_per_token
    assert added == pytest.approx(whole.attention_per_square * 512 / 2, rel=1e-3)


def test_derived_costs_are_near_the_published_measurement() -> None:
    """ByteScale's LLaMA-7B: attention 9.21e-9 ms a square, the rest 3.52e-4 a token; other GPUs, so by the ratio."""
    profile = derived_profile(hdp_config(), MESH)
    ratio = profile.linear_s_per_token / profile.attention_s_per_square
    assert ratio == pytest.approx(3.52e-4 / 9.21e-9, rel=0.25)
    assert "derived" in profile.origin
    slower = derived_profile(hdp_config(), MESH, link_bytes_per_s=12.5e9)
    assert slower.ring_s_per_byte == pytest.approx(2 * profile.ring_s_per_byte)


def test_a_faster_peak_makes_all_times_shorter_and_none_rounds_to_nothing() -> None:
    config = hdp_config(train={"peak_flops_per_rank": 2.25e15})
    fast = derived_profile(config, MESH)
    assert fast.linear_s_per_token < derived_profile(hdp_config(), MESH).linear_s_per_token / 7
    costs = replace(fast).costs(config, MESH)
    assert costs.attention_per_square > 10 and costs.linear_per_token > 10

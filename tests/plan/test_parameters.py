"""Which part of each parameter a rank holds, and that each element is counted once over a mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.config import Config, ModelConfig
from hpc_train.errors import ConfigError
from hpc_train.launch.checks import check_sizes
from hpc_train.models.transformer import Transformer
from hpc_train.plan.memory import fullest_stage
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.parameters import (
    LocalParameter,
    ModelPart,
    TensorSplit,
    check_rows,
    check_split,
    num_parameters,
    plan_parameters,
    row_unit,
)
from hpc_train.plan.stages import split_layers
from tests.plan.reports import make_config

SEQ_LEN = 12


def make_model(family: str, kv_heads: int | None, tied: bool, block: str = "serial") -> ModelConfig:
    return ModelConfig(
        family=family, num_layers=4, hidden_size=24, num_heads=12, num_kv_heads=kv_heads, ffn_hidden_size=48,
        vocab_size=31, tied_embeddings=tied, block=block,
    )  # fmt: skip


def parts_of(config: ModelConfig, pp: int, tp: int, sequence_parallel: bool) -> list[tuple[LocalParameter, ...]]:
    stages = split_layers([1] * config.num_layers, 0, 1, pp)
    return [
        plan_parameters(
            config,
            SEQ_LEN,
            ModelPart(layers, stage == 0, stage == pp - 1),
            TensorSplit(tp, place, sequence_parallel),
        )
        for stage, layers in enumerate(stages)
        for place in range(tp)
    ]


@given(
    family=st.sampled_from(["gpt", "llama"]),
    kv_heads=st.sampled_from([None, 1, 2, 3, 4, 6]),
    tied=st.booleans(),
    pp=st.sampled_from([1, 2, 3, 4]),
    tp=st.sampled_from([1, 2, 3, 4, 6, 12]),
    sequence_parallel=st.booleans(),
    block=st.sampled_from(["serial", "parallel"]),
)
def test_every_element_of_every_parameter_is_counted_exactly_once(
    family: str, kv_heads: int | None, tied: bool, pp: int, tp: int, sequence_parallel: bool, block: str
) -> None:
    """FC-89: replicated norms, shared key/value heads and tied embeddings too."""
    config = make_model(family, kv_heads if family == "llama" else None, tied, block)
    counts: dict[str, np.ndarray] = {}
    for part in parts_of(config, pp, tp, sequence_parallel):
        for plan in part:
            whole = counts.setdefault(plan.name, np.zeros(plan.shape, dtype=int))
            local = np.zeros(plan.box.num_elements, dtype=int)
            if plan.counted_from is not None:
                local[plan.counted_from :] = 1
            box = tuple(slice(low, low + size) for low, size in zip(plan.box.offsets, plan.box.sizes, strict=True))
            whole[box] += local.reshape(plan.box.sizes)
    expected = {name: tuple(p.shape) for name, p in Transformer(config, SEQ_LEN).named_parameters()}
    assert {name: array.shape for name, array in counts.items()} == expected
    assert all((array == 1).all() for array in counts.values())
    assert sum(array.size for array in counts.values()) == num_parameters(config, SEQ_LEN)


def test_query_heads_have_their_key_value_heads_beside_them() -> None:
    config = make_model("llama", 4, tied=False)
    for tp in (1, 2, 3, 4, 6, 12):
        for place in range(tp):
            split = TensorSplit(tp, place, False)
            assert {head // 3 for head in split.heads(config)} == set(split.kv_heads(config))


def test_query_heads_name_their_key_value_heads_where_those_are_not_for_equal_groups() -> None:
    for num_heads, kv_heads in ((n, k) for n in range(1, 25) for k in range(1, n + 1) if n % k == 0):
        config = ModelConfig(
            family="llama", num_layers=1, hidden_size=2 * num_heads, num_heads=num_heads, num_kv_heads=kv_heads,
            ffn_hidden_size=48, vocab_size=31,
        )  # fmt: skip
        for tp in (degree for degree in range(1, num_heads + 1) if num_heads % degree == 0):
            for place in range(tp):
                split = TensorSplit(tp, place, False)
                heads, own = split.heads(config), split.kv_heads(config)
                named = split.kv_of_head(config)
                if named is None:
                    assert len(heads) % len(own) == 0, "attention takes equal groups alone"
                    named = tuple(index // (len(heads) // len(own)) for index in range(len(heads)))
                assert [own[index] for index in named] == [head * kv_heads // num_heads for head in heads]


def test_a_vocabulary_that_does_not_divide_is_shared_out_to_the_last_id() -> None:
    config = make_model("gpt", None, tied=False)
    shares = [TensorSplit(4, place, False).vocabulary(config) for place in range(4)]
    assert [len(share) for share in shares] == [7, 8, 8, 8]
    assert [id_ for share in shares for id_ in share] == list(range(31))


@pytest.mark.parametrize(
    ("tp", "message"),
    [
        (5, "parallel.tp=5 does not split model.num_heads=12.*Use tp=1, 2, 3, 4, 6 or 12"),
        (8, "parallel.tp=8 does not split"),
    ],
)
def test_splits_that_do_not_work_are_refused_with_those_that_do(tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_split(make_model("llama", None, tied=False), tp)


def _rows(seq_len: int, hdp: dict[str, Any] | None = None, **parallel: Any) -> Config:
    return make_config({"tp": 2, "hdp": hdp, **parallel}, data={"seq_len": seq_len, "train": [{"prefix": "x"}]})


def test_sequences_that_tp_does_not_share_are_refused_with_the_nearest_that_it_does() -> None:
    check_rows(_rows(12, sequence_parallel=True), 2)
    with pytest.raises(ConfigError, match=r"data.seq_len=13 is not a multiple of parallel.tp=2.*Use seq_len=12 or 14"):
        check_rows(_rows(13, sequence_parallel=True), 2)
    check_rows(_rows(13), 2)


@pytest.mark.parametrize(
    ("capacity", "parallel", "message"),
    [
        (513, {"sequence_parallel": True}, "not a multiple of 2, into which the parallel.tp=2 ranks .*_tokens=512$"),
        (514, {"sequence_parallel": True, "tp_tiles": 2}, "multiple of 4, .* and parallel.tp_tiles=2 .*_tokens=512$"),
        (514, {"tp_tiles": 3}, "not a multiple of 3, into which parallel.tp_tiles=3 cut a row.*_tokens=513$"),
        (128, {"tp_tiles": 500}, "capacity_tokens=500$"),
    ],
)
def test_with_hdp_a_full_row_has_to_be_shared_and_lengths_do_not(
    capacity: int, parallel: dict[str, Any], message: str
) -> None:
    """Rows are padded, so that documents may have any length."""
    config = _rows(4097, {"capacity_tokens": capacity}, **parallel)
    with pytest.raises(ConfigError, match=message):
        check_rows(config, 2)
    unit = row_unit(config, 2)
    fitting = _rows(4097, {"capacity_tokens": 12 * unit * 128}, **parallel)
    check_rows(fitting, 2)
    mesh = Mesh(pp=1, dp=8, cp=1, tp=2)
    assert fullest_stage(fitting, mesh)[1].total > 0
    check_sizes(fitting, mesh)

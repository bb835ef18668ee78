from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.config_read import dump_yaml
from hpc_train.errors import ConfigError, DataError
from hpc_train.launch.checks import check_data_files, check_sizes, compare_with_earlier, differing_keys
from hpc_train.plan.mesh import Mesh
from tests.launch.configs import small_config


def mesh(dp: int) -> Mesh:
    return Mesh(pp=1, dp=dp, cp=1, tp=1)


def test_batches_that_do_not_divide_and_missing_data_are_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    check_sizes(config, mesh(4))
    check_data_files(config)
    with pytest.raises(ConfigError, match="8"):
        check_sizes(config, mesh(3))
    (tmp_path / "corpus.idx").unlink()
    with pytest.raises(DataError, match=r"corpus\.idx: no such file"):
        check_data_files(config)


def test_an_earlier_run_may_be_gone_on_with_but_not_with_another_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert compare_with_earlier(run, small_config(tmp_path)).changes == ()
    (run / "config.yaml").write_text(dump_yaml(small_config(tmp_path)))
    longer = compare_with_earlier(run, small_config(tmp_path, train={"steps": 20}))
    assert longer.changes == ("changed since the last attempt: train.steps: 2 -> 20",)
    wider = small_config(tmp_path, model={"hidden_size": 16})
    changed = ("changed since the last attempt: model.hidden_size: 8 -> 16",)
    assert compare_with_earlier(run, wider).changes == changed, "nothing was trained yet"
    (run / "checkpoints/step_2").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"another model.*model\.hidden_size: 8 -> 16"):
        compare_with_earlier(run, wider)
    (run / "checkpoints/step_2").rmdir()
    (run / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"another model"):
        compare_with_earlier(run, wider)
    sharper = {"rope_theta": 5e5, "norm_eps": 1e-6}
    with pytest.raises(ConfigError, match=r"do not fit: model\.norm_eps: 1e-05 -> 1e-06\. Give"):
        config = small_config(tmp_path, model=sharper, checkpoint={"allow_changed_model": ["rope_theta"]})
        compare_with_earlier(run, config)
    config = small_config(tmp_path, model=sharper, checkpoint={"allow_changed_model": ["rope_theta", "norm_eps"]})
    assert "changed since the last attempt: model.rope_theta: 10000.0 -> 500000.0" in (
        compare_with_earlier(run, config).changes
    )


def test_a_run_that_is_done_is_done_only_while_nothing_changed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_yaml(small_config(tmp_path)))
    (run / "outcome.json").write_text(json.dumps({"outcome": "done", "time": "then"}))
    assert compare_with_earlier(run, small_config(tmp_path)).done == "then"
    assert not compare_with_earlier(run, small_config(tmp_path, train={"steps": 20})).is_done


def test_each_differing_leaf_is_named_once_with_both_values() -> None:
    old = {"a": {"b": 1, "c": 2}, "d": [1]}
    new = {"a": {"b": 1, "c": 3}, "d": [2], "e": None}
    assert list(differing_keys(old, new)) == ["a.c: 2 -> 3", "d: [1] -> [2]"]


@pytest.mark.parametrize(("name", "value"), [("gradient_wire", "bf16"), ("overlap", "false")])
def test_a_setting_of_dp_s_transfers_is_refused_where_there_are_none(tmp_path: Path, name: str, value: str) -> None:
    config = small_config(tmp_path, parallel={name: {"false": False}.get(value, value)})
    check_sizes(config, mesh(2))
    with pytest.raises(ConfigError, match=rf"parallel\.{name}={value} has no effect with dp=1.*dp=2 or more"):
        check_sizes(config, mesh(1))


def test_virtual_stages_without_layers_and_too_few_micro_batches_are_refused_with_what_works(tmp_path: Path) -> None:
    def check(pp: int, **parallel: object) -> None:
        config = small_config(tmp_path, model={"num_layers": 6}, parallel={"pp": pp, **parallel})
        check_sizes(config, Mesh(pp=pp, dp=1, cp=1, tp=1))

    check(2, virtual_stages=3)
    check(2, virtual_stages=3, schedule="zero_bubble")
    with pytest.raises(
        ConfigError, match=r"virtual_stages=4 on parallel.pp=2 .* needs 8 layers.* Use virtual_stages=3"
    ):
        check(2, virtual_stages=4)
    with pytest.raises(ConfigError, match=r"Use pp=6 or less with virtual_stages=1"):
        check(8, virtual_stages=2)
    few = small_config(
        tmp_path, model={"num_layers": 6}, train={"global_batch_size": 3}, parallel={"pp": 4, "schedule": "zero_bubble"}
    )
    with pytest.raises(ConfigError, match=r"has 3 micro-batches a step; .* at least 4. Use parallel.pp=3 or less"):
        check_sizes(few, Mesh(pp=4, dp=1, cp=1, tp=1))


def test_tiles_that_do_not_divide_are_refused_with_the_nearest_that_do(tmp_path: Path) -> None:
    def check(tp_tiles: int, **parallel: object) -> None:
        config = small_config(tmp_path, model={"num_heads": 2}, parallel={"tp": 2, "tp_tiles": tp_tiles, **parallel})
        check_sizes(config, Mesh(pp=1, dp=1, cp=1, tp=2))

    check(4, sequence_parallel=True)
    with pytest.raises(ConfigError, match=r"tp_tiles=3 does not divide the \d+ rows .* Use tp_tiles=2 or 4$"):
        check(3, sequence_parallel=True)
    with pytest.raises(ConfigError, match=r"tp_tiles=3 .* tokens of a micro-batch. Use tp_tiles=2 or 4$"):
        check(3)
    with pytest.raises(ConfigError, match=r"tp_tiles=1000 .* Use tp_tiles=4$"):
        check(1000, sequence_parallel=True)

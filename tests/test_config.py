"""Configuration: YAML, recipes, overrides, and errors that name the key."""

from __future__ import annotations

import pytest

from hpc_train.config_read import build_config, dump_yaml, load_config, recipe_names
from hpc_train.config_text import parse_yaml
from hpc_train.errors import ConfigError, ExitCode


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_a_valid_configuration_that_survives_being_saved(name):
    config = load_config(name)
    assert build_config(parse_yaml(dump_yaml(config), "saved"), "saved") == config


def test_overrides_reach_sections_and_lists_and_the_last_one_wins():
    config = load_config("tiny", ["train.steps=7", "train.steps=9", "data.train.0.weight=2", "optimizer.lr=3e-4"])
    assert (config.train.steps, config.data.train[0].weight, config.optimizer.lr) == (9, 2.0, 3e-4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=7", "train.step: unknown key; did you mean steps"),
        ("modle.num_layers=2", "modle: unknown key; did you mean model"),
        ("data.train.0.prefx=a", "data.train.0.prefx: unknown key; did you mean prefix"),
        ("train.steps=many", "train.steps: .*many"),
        ("train.steps=0", "train.steps: .*greater than 0"),
        ("train.steps=true", "train.steps: this is no switch"),
        ("optimizer.lr=.nan", "optimizer.lr: .*finite"),
        ("model.hidden_size=130", "model.hidden_size=130 is not a multiple of model.num_heads=4"),
        ("model.num_kv_heads=3", "model.num_heads=4 is not a multiple of model.num_kv_heads=3"),
        ("parallel.cp=2", "parallel.cp=2 is not supported"),
        ("parallel.sequence_parallel=true", "no effect with tp=1; leave it out .it is for tp of 2"),
        ("parallel.tp_tiles=4", "tp_tiles=4 has no effect with tp=1; leave it out .it is for tp of 2"),
        (
            "checkpoint.local={path: scratch, every: 2}",
            "path=scratch is not a path from / on, nor a variable such as \\$TMPDIR",
        ),
        ("checkpoint.local={path: /scratch, evry: 2}", "checkpoint.local.evry: unknown key; did you mean every"),
        ("checkpoint={writer: rank, local: {path: /scratch, every: 2}}", "no effect with checkpoint.writer=rank"),
        ("optimizer.min_lr=1", "optimizer.min_lr=1.0 is above optimizer.lr"),
        ("name=../x", "name: "),
        ("model.attention_window=257", "257 of layer 0 is longer than data.seq_len=256. Use 256 or less, or null"),
        ("model.attention_window=[8,null,300,8]", "300 of layer 2 is longer than data.seq_len=256"),
        ("model.attention_window=[8,null]", "has 2 entries and model.num_layers=4; give one entry for each layer"),
        ("model.attention_window=0", "model.attention_window=0: give a number of tokens above 0"),
        ("model.attention_window=[8,0,8,8]", r"model.attention_window=\[8, 0, 8, 8\]: give a number of tokens above 0"),
        ("model.attention_window=wide", "model.attention_window='wide': give a number of tokens above 0"),
        ("model.block=both", "model.block: .*'serial' or 'parallel'"),
        (
            "parallel.hdp={capacity_tokens: 3000000000}",
            "capacity_tokens: .*less than or equal to 2147483647",
        ),
        ("train.seed=18446744073709551616", "train.seed: .*9223372036854775807, the largest number that random gener"),
        ("data.seq_len=99999999999999", "data.seq_len: .*2147483647, what libraries below count sizes to"),
        ("model.rope_theta=true", "model.rope_theta: this is no switch"),
        ("data.train.0.weight=false", "data.train.0.weight: this is no switch"),
        ("model.rope_theta=1e30", "model.rope_theta: .*, a thousand times that of any model"),
        ("optimizer.lr=1e30", "optimizer.lr: .*, since an update moves each weight by about that much"),
        ("parallel.layers_per_stage=4", "layers_per_stage=4 is no list .*Use parallel.layers_per_stage=null"),
        ("parallel.layers_per_stage=[0,2,1,1]", "each stage has a layer at least. Use parallel.layers_per_stage=null"),
        ("observe.trace_steps=5", r"Use observe.trace_steps=\[5,5\], or null for all"),
        ("observe.trace_steps=[0,5]", r"Use observe.trace_steps=\[1,5\], or null for all"),
        ("observe.trace_steps=[-3,0]", r"Use observe.trace_steps=\[1,1\], or null for all"),
        ("observe.trace_steps=[null,5]", r"Use observe.trace_steps=\[1,5\], or null for all"),
        ("observe.trace_steps=2-5", r"Use observe.trace_steps=\[2,5\], or null for all"),
        (
            "observe.trace_steps=[1000000,1000001]",
            r"begins behind the last step, train.steps=(\d+), .* Use observe.trace_steps=\[1,\1\]",
        ),
        ("train.steps", "is not an override"),
        ("train.steps.more=1", "which is a value"),
        ("data.train.5.weight=1", "not an index"),
        ("train.steps={", "not valid YAML"),
        ("train.steps=2024-02-31", "not valid YAML: '2024-02-31' is no value"),
    ],
)
def test_a_wrong_override_is_refused_and_named(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config("tiny", [override])
    assert caught.value.exit_code == ExitCode.USAGE


def test_an_attention_window_is_one_number_or_one_for_each_layer():
    windows = [
        load_config("tiny", [f"model.attention_window={text}"]).model.windows for text in ("8", "[8,null,256,9]")
    ]
    assert windows == [(8, 8, 8, 8), (8, None, 256, 9)]
    assert load_config("tiny").model.windows == (None,) * 4


def test_all_faults_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config("tiny", ["train.step=7", "optimizer.lr=-1"])
    assert "train.step" in str(caught.value)
    assert "optimizer.lr" in str(caught.value)


def test_evaluation_without_heldout_data_is_refused():
    with pytest.raises(ConfigError, match="no held-out data"):
        load_config("tiny", ["data.heldout=[]"])


def test_a_range_of_traced_steps_with_no_step_in_it_is_refused():
    with pytest.raises(ConfigError, match=r"observe\.trace_steps=\[9, 3\] has no step in it; write \[3, 9\]"):
        load_config("tiny", ["observe.trace_steps=[9,3]"])


def test_a_setting_without_effect_is_refused():
    with pytest.raises(ConfigError, match="no effect"):
        load_config("tiny", ["model.family=gpt"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "expected a mapping"),
        ("a: 1\na: 2\n", "given twice"),
        ("a: [", "not valid YAML"),
        ("", "NoneType"),
        ("a: 1\nb: 2024-13-45\n", "'2024-13-45' is no value: month must be in 1..12\n.*line 2"),
        ("a: 0b_\n", "'0b_' is no value"),
        (f"a: {'9' * 5000}\n", "is no value: Exceeds the limit"),
        ("a: 1\n? [b]\n: 2\n", "a key has to be a word\n.*line 2"),
        (f"a: {'[' * 3000}{']' * 3000}\n", "nested without end"),
    ],
)
def test_a_broken_file_is_refused_with_its_name(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert "c.yaml" in str(caught.value)


def test_a_byte_order_mark_before_a_file_is_passed_over(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbf" + dump_yaml(load_config("tiny")).encode())
    assert load_config(tmp_path / "a.yaml") == load_config("tiny")


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"neither a file nor a recipe.*tiny"):
        load_config("no-such-recipe")


@pytest.mark.parametrize("text", ["3e-4", "3.0e-4", "0.0003", "3E-4"])
def test_numbers_with_an_exponent_are_numbers(text):
    assert load_config("tiny", [f"optimizer.lr={text}", "optimizer.min_lr=0"]).optimizer.lr == 3e-4


def test_a_wrong_entry_of_a_list_is_one_fault():
    with pytest.raises(ConfigError) as caught:
        load_config("tiny", ["data.train.0.weight=-1"])
    assert "data.train.0.weight" in str(caught.value)
    assert "at least 1 item" not in str(caught.value)

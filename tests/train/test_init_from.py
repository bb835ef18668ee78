"""Runs that begin with the weights of a converted model or of another run."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpc_train.checkpoint.convert.convert_hf import convert
from hpc_train.checkpoint.folders.find import CONFIG_VALUE
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.format.model_tensors import ModelSpec
from hpc_train.checkpoint.loading.init_from import load_weights
from hpc_train.checkpoint.loading.load import Loaded
from hpc_train.checkpoint.stores.location import locate
from hpc_train.config import CheckpointConfig
from hpc_train.config_read import load_config
from hpc_train.errors import CheckpointError
from hpc_train.train import loop
from hpc_train.train.state import state_pieces
from tests.checkpoint.convert.hf_folders import weights, write_checkpoint
from tests.ranks import run_ranks
from tests.train.forked_runs import train_forked
from tests.train.runs import VOCAB, hpc_train, metrics, write_config, write_corpus
from tests.train.trainers import MODELS, SEQ_LEN, TREES, make_config, make_trainer
from tests.worlds import make_world, single_world


def _load(me, source, family):
    trainer, spec = make_trainer(me, make_config(TREES[family])), ModelSpec(MODELS[family], SEQ_LEN)
    load_weights(source, state_pieces(trainer), spec, make_world(me))
    trainer.publish_parameters()
    layout, flat = trainer.parameters[0].layout, trainer.parameters[0].parameters
    moments = [float(moment.abs().sum()) for (moment,) in trainer.optimizer.moments.values()]
    return {place.name: flat[place.start : place.stop].view(place.shape) for place in layout.parameters}, moments


@pytest.mark.parametrize(("family", "dtype"), [("gpt", torch.bfloat16), ("llama", torch.float32)])
def test_every_rank_gets_its_part_of_the_weights_and_a_fresh_optimizer(family, dtype, tmp_path):
    spec = ModelSpec(MODELS[family], SEQ_LEN)
    tensors = {name: tensor.to(dtype) for name, tensor in weights(spec).items()}
    write_checkpoint(tmp_path / "init", spec, tensors)
    for found, moments in run_ranks(_load, 2, str(tmp_path / "init"), family):
        assert moments == [0.0, 0.0]
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor.float()) for name, tensor in tensors.items())


class _Alone:
    rank, world_size = 0, 1


def test_damage_is_refused(tmp_path):
    spec = ModelSpec(MODELS["llama"], SEQ_LEN)
    folder = write_checkpoint(tmp_path / "init", spec, weights(spec))
    (box,) = read_manifest(folder).tensors["model.norm.weight"].boxes
    with open(folder / box.file, "r+b") as file:
        file.seek(box.start)
        file.write(b"\x55\x55")
    with pytest.raises(CheckpointError, match=r"checkpoint\.init_from: .*is damaged: the checksum"):
        _load(_Alone(), str(folder), "llama")


def test_weights_of_other_heads_are_refused_though_all_shapes_are_the_same(tmp_path, capsys):
    here = ModelSpec(MODELS["llama"], SEQ_LEN)
    heads, kv_heads = here.model.num_heads // 2, here.model.kv_heads // 2
    other = ModelSpec(here.model.model_copy(update={"num_heads": heads, "num_kv_heads": kv_heads}), SEQ_LEN)
    folder = write_checkpoint(tmp_path / "init", other, weights(other))
    with pytest.raises(CheckpointError, match=rf"model\.num_heads is {heads} there and {2 * heads} here"):
        _load(_Alone(), str(folder), "llama")
    (folder / "model.yaml").unlink()
    _load(_Alone(), str(folder), "llama")
    assert "does not say of which model it is" in capsys.readouterr().err


def test_a_run_that_goes_on_as_another_model_is_refused_unless_it_is_meant(tmp_path, capsys):
    model = MODELS["llama"]
    saved = {"model": model.model_copy(update={"rope_theta": 77.0}).model_dump(mode="json"), "data": {"seq_len": 8}}
    loaded = Loaded(locate(tmp_path), 3, {CONFIG_VALUE: saved}, 3)

    def compare(*allowed):
        checkpoint = CheckpointConfig(allow_changed_model=allowed)
        config = SimpleNamespace(model=model, data=SimpleNamespace(seq_len=SEQ_LEN), checkpoint=checkpoint)
        loop._compare_model(SimpleNamespace(config=config, world=single_world()), loaded)

    with pytest.raises(CheckpointError, match=r"rope_theta is 77\.0 there .*\n.*allow_changed_model=\[rope_theta\]"):
        compare()
    compare("rope_theta")
    assert "model.rope_theta is 77.0 there and 10000.0 here (checkpoint.allow_changed_model)" in capsys.readouterr().out
    loaded.values.clear()  # of early versions
    compare()


def _refused(me, source, family):
    try:
        _load(me, source, family)
    except CheckpointError as error:
        return error.reporter, str(error)
    return None


def test_another_model_is_refused_on_all_ranks_with_the_names_that_differ(tmp_path):
    model = MODELS["llama"].model_copy(update={"num_layers": 1, "tied_embeddings": True, "vocab_size": 62})
    spec = ModelSpec(model, SEQ_LEN)
    write_checkpoint(tmp_path / "init", spec, weights(spec))
    for reporter, message in run_ranks(_refused, 2, str(tmp_path / "init"), "llama"):
        assert reporter == 0
        assert "checkpoint.init_from: " in message
        assert "missing: model.layers.1.attention_norm.weight, model.layers.1.attention.q.weight" in message
        assert "model.head.weight" in message
        assert "wrong shapes: model.embedding.weight is [62, 32], not [61, 32]" in message


def _run(folder: Path, *overrides: str):
    return hpc_train(["run", folder / "config.yaml", "-n", "2", "--run-dir", folder / "run", *overrides])


@pytest.mark.mpi
def test_a_run_begins_with_converted_weights_and_goes_on_from_its_own_checkpoint(tmp_path):
    write_corpus(tmp_path / "corpus")
    spec = ModelSpec(load_config(write_config(tmp_path)).model, 32)
    # A head of zeros gives every token the same probability, which no other weights do.
    tensors = weights(spec) | {"head.weight": torch.zeros(VOCAB, spec.model.hidden_size)}
    write_checkpoint(tmp_path / "ours", spec, tensors)
    convert(tmp_path / "ours", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "init")

    begin = f"checkpoint.init_from={tmp_path / 'init'}"
    first = _run(tmp_path, begin, "train.steps=2")
    assert first.returncode == 0, first.stdout + first.stderr
    assert re.search(rf"begins with the weights of {tmp_path / 'init'}\n", first.stdout)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["loss"] == pytest.approx(math.log(VOCAB), rel=1e-6)
    assert lines[1]["loss"] < lines[0]["loss"]

    again = train_forked(tmp_path, "run", 2, begin, "train.steps=3")
    said = (tmp_path / "run/logs/forked.log").read_text()
    assert "begins with" not in said
    assert "resumed from" in said
    assert [line["step"] for line in again] == [1, 2, 3]

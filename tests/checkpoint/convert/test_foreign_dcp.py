"""Checkpoints that torch.distributed.checkpoint wrote by itself are converted, and their pickles run nothing."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import yaml

from hpc_train.checkpoint.convert.convert_hf import convert
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.errors import CheckpointError, ConfigError
from tests.checkpoint.convert.hf_folders import SPECS, stored_weights, weights
from tests.ranks import run_ranks

SPEC = SPECS["llama"]


def _save_by_torch(me, folder):
    """Each weight cut over the ranks where it can be, as torch's own sharded training has it; moments beside."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (me.world_size,))
    model = {
        name: distribute_tensor(tensor, mesh, [Shard(0)]) if tensor.ndim == 2 else tensor
        for name, tensor in weights(SPEC).items()
    }
    dcp.save({"model": model, "optim": {"moment": torch.ones(3)}, "step": 7}, checkpoint_id=folder)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign") / "dcp"
    run_ranks(_save_by_torch, 2, str(folder))
    return folder


@pytest.fixture
def config(tmp_path: Path) -> str:
    tree = {
        "name": "x",
        "model": SPEC.model.model_dump(mode="json", exclude_none=True),
        "data": {"seq_len": SPEC.max_seq_len, "train": [{"prefix": "none"}]},
        "train": {"steps": 1, "global_batch_size": 1},
        "optimizer": {"lr": 0.1},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def test_a_sharded_checkpoint_of_torch_becomes_one_of_ours(
    foreign: Path, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = convert(foreign, tmp_path / "ours", config=config)
    found = stored_weights(tmp_path / "ours")
    wanted = weights(SPEC)
    assert found.keys() == wanted.keys() and done.num_parameters == sum(tensor.numel() for tensor in wanted.values())
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    assert read_manifest(tmp_path / "ours").step == 0
    assert "left out, since it is no weight: optim.moment, step" in "".join(capsys.readouterr())


def test_types_are_converted_and_other_models_refused(foreign: Path, config: str, tmp_path: Path) -> None:
    done = convert(foreign, tmp_path / "half", config=config, dtype="bf16")
    assert done.dtypes == ("bfloat16",)
    tree = yaml.safe_load(Path(config).read_text())
    tree["model"]["num_layers"] += 1
    Path(config).write_text(yaml.safe_dump(tree))
    with pytest.raises(CheckpointError, match=r"another model than --config says:\n  missing: model\.layers\."):
        convert(foreign, tmp_path / "other", config=config)
    with pytest.raises(ConfigError, match="name it by --config"):
        convert(foreign, tmp_path / "other")
    assert not (tmp_path / "other").exists()


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_something_is_not_read(config: str, tmp_path: Path) -> None:
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(_Runs(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir, which is no part of an index"):
        convert(folder, tmp_path / "ours", config=config)
    assert not (tmp_path / "ran").exists()


def test_damage_is_named(foreign: Path, config: str, tmp_path: Path) -> None:
    import shutil

    for damage, words in (("cut", "bytes early|holds no tensor"), ("gone", "is missing"), ("index", "is no index")):
        folder = tmp_path / damage
        shutil.copytree(foreign, folder)
        shard = folder / "__1_0.distcp"
        if damage == "cut":
            shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
        elif damage == "gone":
            shard.unlink()
        else:
            (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-9])
        with pytest.raises(CheckpointError, match=words):
            convert(folder, tmp_path / "ours", config=config)
        assert not (tmp_path / "ours").exists()

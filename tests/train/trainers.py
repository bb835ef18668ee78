"""Small trainers and batches for tests of steps, meshes and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hpc_train.config import Config, ModelConfig
from hpc_train.config_read import build_config
from hpc_train.plan.mesh import Mesh
from hpc_train.train.build import build_trainer
from hpc_train.train.step import Trainer
from tests.ranks import TestRank
from tests.worlds import make_world

SEQ_LEN = 16
VOCAB = 61
TREES: dict[str, dict[str, object]] = {
    "gpt": {"family": "gpt", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "tied_embeddings": True},
    "llama": {"family": "llama", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2},
}


@dataclass(frozen=True)
class TestBatch:
    """What a step needs of data.loader.Batch."""

    __test__ = False

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    boundaries: tuple[tuple[int, ...], ...]
    sequences: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def num_supervised(self) -> int:
        return int((self.labels != -100).sum())


def sequences(step: int, count: int) -> list[TestBatch]:
    """`count` sequences of a step, each a batch of one; the loss mask leaves them unequal numbers of labels."""
    generator = torch.Generator().manual_seed(1000 + step)
    batches = []
    for index in range(count):
        tokens = torch.randint(0, VOCAB, (1, SEQ_LEN), generator=generator)
        labels = torch.roll(tokens, -1, dims=1)
        labels[:, -1] = -100
        labels[0, : (index * 5) % (SEQ_LEN - 2)] = -100
        positions = torch.cat([torch.arange(10), torch.arange(SEQ_LEN - 10)])[None]
        batches.append(TestBatch(tokens, labels, positions, ((10, SEQ_LEN - 10),), (index,)))
    return batches


def _model(tree: Mapping[str, object]) -> ModelConfig:
    return ModelConfig.model_validate({"vocab_size": VOCAB, **tree})


def make_config(
    model: Mapping[str, object],
    parallel: Mapping[str, object] | None = None,
    optimizer: Mapping[str, object] | None = None,
    *,
    seq_len: int = SEQ_LEN,
    **train: object,
) -> Config:
    """A configuration of a model of TREES or like it; no data file is opened."""
    tree = {
        "name": "test",
        "model": {"vocab_size": VOCAB, **model},
        "parallel": dict(parallel or {}),
        "data": {"seq_len": seq_len, "train": [{"prefix": "none"}]},
        "train": {"steps": 10, "global_batch_size": 24, "seed": 7, **train},
        "optimizer": {"lr": 1e-2, "clip_grad_norm": 0.5, **(optimizer or {})},
    }
    return build_config(tree, "test")


MODELS = {name: _model(tree) for name, tree in TREES.items()}


def mesh_of(config: Config, world_size: int) -> Mesh:
    parallel = config.parallel
    return Mesh.fill(world_size, pp=parallel.pp, dp=parallel.dp, cp=parallel.cp, tp=parallel.tp)


def make_trainer(me: TestRank, config: Config, dtype: torch.dtype | None = None) -> Trainer:
    return build_trainer(config, mesh_of(config, me.world_size), make_world(me), dtype)


def share_of(trainer: Trainer, batches: list[TestBatch]) -> list[TestBatch]:
    """The batches of this rank's place on the dp axis."""
    count = len(batches) // trainer.groups.mesh.dp
    place = trainer.groups.coords["dp"]
    return batches[place * count : (place + 1) * count]

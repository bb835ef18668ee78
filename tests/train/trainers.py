"""Small trainers and batches for tests of steps and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpc_train.comm.collectives import Group
from hpc_train.config import ModelConfig, OptimizerConfig
from hpc_train.models.transformer import Transformer
from hpc_train.parallel.data import ShardedParameters
from hpc_train.train.optimizer import ShardedAdamW
from hpc_train.train.step import Trainer

SEQ_LEN = 16
MODELS = {
    "gpt": ModelConfig(family="gpt", num_layers=2, hidden_size=32, num_heads=4, vocab_size=61, tied_embeddings=True),
    "llama": ModelConfig(family="llama", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, vocab_size=61),
}


@dataclass(frozen=True)
class TestBatch:
    """What a step needs of data.loader.Batch."""

    __test__ = False

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    boundaries: tuple[tuple[int, ...], ...]

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
        tokens = torch.randint(0, 61, (1, SEQ_LEN), generator=generator)
        labels = torch.roll(tokens, -1, dims=1)
        labels[:, -1] = -100
        labels[0, : (index * 5) % (SEQ_LEN - 2)] = -100
        positions = torch.cat([torch.arange(10), torch.arange(SEQ_LEN - 10)])[None]
        batches.append(TestBatch(tokens, labels, positions, ((10, SEQ_LEN - 10),)))
    return batches


def make_trainer(group: Group, family: str = "llama", dtype: torch.dtype = torch.float32) -> Trainer:
    model = Transformer(MODELS[family], SEQ_LEN)
    model.init_weights(seed=7)
    parameters = ShardedParameters(model, group, dtype)
    optimizer = ShardedAdamW(parameters, OptimizerConfig(lr=1e-2, weight_decay=0.1))
    return Trainer(model, parameters, optimizer, clip_grad_norm=0.5, device=torch.device("cpu"))

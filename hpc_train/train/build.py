"""From a configuration to the parts of a run, after every check that can be made before training."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from hpc_train.comm.collectives import world_group
from hpc_train.comm.world import World
from hpc_train.config import Config
from hpc_train.data.loader import Loader
from hpc_train.errors import HpcTrainError
from hpc_train.log import say
from hpc_train.models.transformer import Transformer
from hpc_train.parallel.data import ShardedParameters
from hpc_train.train.loop import Run
from hpc_train.train.metrics import Metrics
from hpc_train.train.optimizer import ShardedAdamW
from hpc_train.train.peak import world_peak_flops
from hpc_train.train.step import Trainer

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_run(run_dir: Path, config: Config, world: World) -> Run:
    """Everything that the loop needs. Collective over all ranks.

    Raises:
        ConfigError, DataError: on every rank, before any collective of the training.
    """
    loader = _open_data(config, world)
    trainer = build_trainer(config, world)
    peak, origin = world_peak_flops(world, _DTYPES[config.train.precision], config.train.peak_flops_per_rank)
    if world.rank == 0:
        count = trainer.parameters.layout.num_elements
        say(f"model: {count / 1e6:.2f} M parameters, {config.train.precision}")
        say(f"peak of all ranks for MFU: {peak / 1e9:.1f} GFLOP/s ({origin})")
    return Run(config, world, run_dir, trainer, loader, _open_metrics(run_dir, config, world), peak)


def build_trainer(config: Config, world: World) -> Trainer:
    """Model, sharded parameters and optimizer on this rank's device."""
    model = Transformer(config.model, config.data.seq_len)
    model.init_weights(config.train.seed)
    model.to(world.device)
    group = world_group(world.world_size, world.rank, world.backend)
    parameters = ShardedParameters(model, group, _DTYPES[config.train.precision])
    gc.collect()  # the tensors that the flat buffer replaced
    optimizer = ShardedAdamW(parameters, config.optimizer)
    return Trainer(model, parameters, optimizer, config.optimizer.clip_grad_norm, world.device)


def _open_data(config: Config, world: World) -> Loader:
    loader, error = None, None
    try:
        loader = Loader(config.data, config.train, vocab_size=config.model.vocab_size, dp=world.world_size)
    except HpcTrainError as problem:
        error = problem
    world.agree(error)
    assert loader is not None
    return loader


def _open_metrics(run_dir: Path, config: Config, world: World) -> Metrics | None:
    if world.rank != 0:
        return None
    return Metrics(
        run_dir,
        tensorboard=config.observe.tensorboard,
        num_steps=config.train.steps,
        log_every=config.train.log_every,
    )

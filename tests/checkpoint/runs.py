"""A tiny model trained, saved and resumed, for functions under `run_ranks`."""

from __future__ import annotations

import torch

from hpc_train.checkpoint.loading.load import load_newest
from hpc_train.checkpoint.saving.save import save_checkpoint
from hpc_train.train.state import state_pieces
from tests.train.trainers import TREES, make_config, make_trainer, sequences
from tests.worlds import make_world


def train_and_save(me, root, saves, dtype=torch.float32, last=4):
    """Train to `last`, saving at the steps in `saves`; losses and final weights."""
    trainer, world, losses, step = make_trainer(me, make_config(TREES["llama"]), dtype), make_world(me), [], 1
    for stop in dict.fromkeys([*saves, last]):
        losses += _steps(me, trainer, step, stop)
        step = stop + 1
        if stop in saves:
            values = {"num_updates": trainer.optimizer.num_updates}
            save_checkpoint(root, stop, state_pieces(trainer), values, world, keep=0)
    trainer.publish_parameters()
    return losses, trainer.parameters[0].parameters


def resume(me, root, dtype=torch.float32, last=4):
    """Load the newest and train on to `last`; its step, losses and final weights, or None where there is none."""
    trainer, world = make_trainer(me, make_config(TREES["llama"]), dtype), make_world(me)
    loaded = load_newest(root, state_pieces(trainer), world)
    if loaded is None:
        return None
    trainer.optimizer.num_updates = loaded.values["num_updates"]
    trainer.publish_parameters()
    losses = _steps(me, trainer, loaded.step + 1, last)
    trainer.publish_parameters()
    return loaded.step, losses, trainer.parameters[0].parameters


def _steps(me, trainer, first, last):
    steps = range(first, last + 1)
    return [trainer.step(step, sequences(step, 6)[me.rank :: me.world_size], 1e-2).loss for step in steps]

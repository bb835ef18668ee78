"""State to save and load without a model: numbers that follow from the step, cut over ranks."""

from __future__ import annotations

import torch

from hpc_train.checkpoint.format.state import StatePiece
from hpc_train.checkpoint.loading.load import load_newest
from hpc_train.checkpoint.saving.save import save_checkpoint
from hpc_train.checkpoint.stores.location import Place
from hpc_train.plan.flat import Box
from tests.ranks import TestRank
from tests.worlds import make_world


def state(me: TestRank, step: int | None, num_elements: int) -> list[StatePiece]:
    """This rank's rows of two tensors of that many elements in all; step None: zeros, to be filled."""
    pieces = []
    for index, name in enumerate(("model.first", "optimizer.second")):
        rows = num_elements // 2 // 1024
        first, last = (rows * rank // me.world_size for rank in (me.rank, me.rank + 1))
        data = torch.zeros((last - first) * 1024)
        if step is not None:
            data = torch.arange(first * 1024, last * 1024, dtype=torch.float32) * (index + 1) + step * 0.5
        pieces.append(StatePiece(name, (rows, 1024), Box((first, 0), (last - first, 1024)), data))
    return pieces


def save(me: TestRank, place: Place, step: int, num_elements: int, keep: int = 0) -> str:
    """Save the state of a step; where it is. Collective."""
    world = make_world(me)
    return str(save_checkpoint(place, step, state(me, step, num_elements), {"num_updates": step}, world, keep=keep))


def load(me: TestRank, place: Place, num_elements: int) -> int | None:
    """Load the newest and compare every number; its step, or None where there is none. Collective."""
    pieces = state(me, None, num_elements)
    loaded = load_newest(place, pieces, make_world(me))
    if loaded is None:
        return None
    assert loaded.values["num_updates"] == loaded.step
    for piece, wanted in zip(pieces, state(me, loaded.step, num_elements), strict=True):
        assert torch.equal(piece.data, wanted.data), (loaded.step, piece.name)
    return loaded.step


class Alone:
    """The rank of a process without others."""

    rank, world_size, backend = 0, 1, None

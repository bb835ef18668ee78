"""What all ranks need of a checkpoint, and whether it is of the same model: one exchange, one verdict everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hpc_train.checkpoint.location import Location
from hpc_train.checkpoint.manifest import Manifest, StoredBox
from hpc_train.checkpoint.state import StatePiece
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError
from hpc_train.plan.checkpoint_load import BoxTable, LoadPlan, Places, plan_load
from hpc_train.plan.flat import Box

_MOST_NAMES = 5
"""Of each kind of difference; a model with other layers differs in hundreds."""


@dataclass(frozen=True)
class Loading:
    """A planned load of one checkpoint.

    names, boxes: of the plan's tensors and stored boxes. pieces: this rank's, by their row of the plan's needs.
    folder_of: of files that do not lie in `path`.
    """

    path: Location
    manifest: Manifest
    names: tuple[str, ...]
    boxes: tuple[StoredBox, ...]
    plan: LoadPlan
    pieces: dict[int, StatePiece]
    folder_of: Mapping[str, Location] = field(default_factory=dict)

    def dtype(self, tensor: int) -> torch.dtype:
        """The type in which it is stored."""
        found: torch.dtype = getattr(torch, self.manifest.tensors[self.names[tensor]].dtype)
        return found


def plan_loading(
    path: Location,
    manifest: Manifest,
    pieces: Sequence[StatePiece],
    world: World,
    *,
    exact: bool,
    spread: Mapping[str, tuple[int, Location]] | None = None,
) -> Loading:
    """Tell all ranks what each one needs, and plan who reads it. Collective over all ranks.

    exact: all that is stored must be wanted by some rank, in the type in which it is stored; otherwise what is not
    wanted is left and types are converted. spread: where files lie that only one node has: by name the node and its
    folder; None: all lie in `path`, which all nodes see.

    Raises:
        CheckpointError: on every rank: the checkpoint is of another model, with the first names that differ.
    """
    names = tuple(manifest.tensors)
    number = {name: index for index, name in enumerate(names)}
    faults = _faults(manifest, pieces, exact)
    mine = [] if any(faults) else [[number[p.name], *p.box.offsets, *p.box.sizes] for p in pieces]
    gathered = world.control.all_gather([world.node_rank, world.local_rank, mine, faults])
    shapes = [len(tensor.shape) for tensor in manifest.tensors.values()]
    holder = np.repeat(np.arange(world.world_size), [len(told[2]) for told in gathered])
    needs = [(row[0], _box_of(row, shapes[row[0]])) for told in gathered for row in told[2]]
    missing, different = ([fault for told in gathered for fault in told[3][kind]] for kind in (0, 1))
    wanted = {tensor for tensor, _ in needs}
    # Ranks that found a fault have not told their needs, so that nothing follows from what nobody wants.
    is_told = exact and not missing and not different
    extra = [name for index, name in enumerate(names) if index not in wanted] if is_told else []
    _refuse_other_model(path, missing, different, extra, world)
    boxes = sorted(
        ((stored, number[name]) for name, tensor in manifest.tensors.items() for stored in tensor.boxes),
        key=lambda item: (item[0].file, item[0].start),
    )
    most = max([1, *shapes])
    sizes = np.array([getattr(torch, tensor.dtype).itemsize for tensor in manifest.tensors.values()], dtype=np.int64)
    stored = BoxTable.of([(tensor, box.box) for box, tensor in boxes], most)
    places = Places(np.array([told[0] for told in gathered]), np.array([told[1] for told in gathered]))
    lies_on = None if spread is None else np.array([spread[box.file][0] for box, _ in boxes], dtype=np.int64)
    plan = plan_load(stored, sizes[stored.tensor], BoxTable.of(needs, most), holder, places, lies_on=lies_on)
    first = int(np.searchsorted(holder, world.rank))
    own = dict(enumerate(pieces, start=first))
    folder_of = {} if spread is None else {file: folder for file, (_, folder) in spread.items()}
    return Loading(path, manifest, names, tuple(box for box, _ in boxes), plan, own, folder_of)


def _box_of(row: list[int], num_dims: int) -> Box:
    return Box(tuple(row[1 : 1 + num_dims]), tuple(row[1 + num_dims :]))


def _faults(manifest: Manifest, pieces: Sequence[StatePiece], exact: bool) -> tuple[list[str], list[str]]:
    """Tensors that this rank misses, and those that are others than its own, the first ones each."""
    missing, different = [], []
    for piece in pieces:
        stored = manifest.tensors.get(piece.name)
        dtype = str(piece.dtype).removeprefix("torch.")
        if stored is None:
            missing.append(piece.name)
        elif stored.shape != piece.shape or (exact and stored.dtype != dtype):
            there, here = f"{stored.dtype}{list(stored.shape)}", f"{dtype}{list(piece.shape)}"
            different.append(f"{piece.name} is {there} there and {here} here")
    return missing[: _MOST_NAMES + 1], different[: _MOST_NAMES + 1]


def _refuse_other_model(
    path: Location, missing: Iterable[str], different: Iterable[str], extra: Iterable[str], world: World
) -> None:
    told = []
    for words, faults in (("it has no tensor ", missing), ("", different), ("only it has ", extra)):
        if once := list(dict.fromkeys(faults)):
            told.append(words + _first(once))
    error = None
    if told and world.rank == 0:
        error = CheckpointError(
            f"{path} is of another model: {'; '.join(told)}. Use the configuration that it was saved with, or another "
            "run folder."
        )
    world.agree(error)


def _first(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")

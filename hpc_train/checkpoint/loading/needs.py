"""What all ranks need of a checkpoint, and whether it is of the same model: one exchange, one verdict everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hpc_train.checkpoint.format.manifest import Manifest
from hpc_train.checkpoint.format.state import StatePiece
from hpc_train.checkpoint.format.stored_boxes import StoredBox
from hpc_train.checkpoint.stores.location import Location
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError
from hpc_train.plan.box_table import BoxTable
from hpc_train.plan.checkpoint_load import LoadPlan, plan_load
from hpc_train.plan.checkpoint_readers import Places
from hpc_train.plan.flat import Box
from hpc_train.plan.run import RAILS

_MOST_NAMES = 5
"""Of each kind of difference; a model with other layers differs in hundreds."""


@dataclass(frozen=True)
class Loading:
    """A planned load of one checkpoint.

    names: of the plan's tensors. place: by row of the plan's stored boxes, its place among those of its tensor.
    pieces: this rank's, by their row of the plan's needs. folder_of: of files that do not lie in `path`.
    """

    path: Location
    manifest: Manifest
    names: tuple[str, ...]
    place: np.ndarray
    plan: LoadPlan
    pieces: dict[int, StatePiece]
    folder_of: Mapping[str, Location] = field(default_factory=dict)

    def stored(self, row: int) -> StoredBox:
        """A stored box by its row of the plan."""
        return self.manifest.tensors[self.names[int(self.plan.stored.tensor[row])]].boxes[int(self.place[row])]

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
    num_dims = np.array([len(tensor.shape) for tensor in manifest.tensors.values()], dtype=np.int64)
    most = int(num_dims.max(initial=1))
    faults = _faults(manifest, pieces, exact)
    # Flat: a list for each box takes longer to tell.
    told_pieces = [] if any(faults) else pieces
    mine = [extent for piece in told_pieces for extent in _row(number[piece.name], piece.box, most)]
    gathered = world.control.all_gather([world.node_rank, _rail(world), mine, faults])
    needs = np.fromiter((extent for told in gathered for extent in told[2]), dtype=np.int64).reshape(-1, 1 + 2 * most)
    holder = np.repeat(np.arange(world.world_size), [len(told[2]) // needs.shape[1] for told in gathered])
    missing, different = ([fault for told in gathered for fault in told[3][kind]] for kind in (0, 1))
    # Ranks that found a fault have not told their needs, so that nothing follows from what nobody wants.
    is_told = exact and not missing and not different
    unwanted = sorted({*range(len(names))} - {*needs[:, 0].tolist()}) if is_told else []
    _refuse_other_model(path, missing, different, [names[tensor] for tensor in unwanted], world)
    stored, place, files = stored_table(manifest, num_dims, most)
    sizes = np.array([tensor.boxes.item_bytes for tensor in manifest.tensors.values()], dtype=np.int64)
    places = Places(np.array([told[0] for told in gathered]), np.array([told[1] for told in gathered]))
    lies_on = None if spread is None else np.array([spread[file][0] for file in files], dtype=np.int64)
    needed = BoxTable(needs[:, 0], needs[:, 1 : 1 + most], needs[:, 1 + most :], num_dims[needs[:, 0]])
    plan = plan_load(stored, sizes[stored.tensor], needed, holder, places, lies_on=lies_on)
    first = int(np.searchsorted(holder, world.rank))
    own = dict(enumerate(pieces, start=first))
    folder_of = {} if spread is None else {file: folder for file, (_, folder) in spread.items()}
    return Loading(path, manifest, names, place, plan, own, folder_of)


def _rail(world: World) -> int:
    """By the plan, where its fabric says so; else a GPU's place on its node."""
    rails = () if world.plan is None else world.plan.further.get(RAILS, ())
    return int(rails[world.rank]) if rails else world.local_rank


def _row(tensor: int, box: Box, most: int) -> tuple[int, ...]:
    """A box of a tensor as numbers, as many for each tensor: filled up as in a `BoxTable`."""
    more = most - len(box.sizes)
    return (tensor, *box.offsets, *(0,) * more, *box.sizes, *(1,) * more)


def stored_table(manifest: Manifest, num_dims: np.ndarray, most: int) -> tuple[BoxTable, np.ndarray, list[str]]:
    """All boxes of a checkpoint as they lie in its files; by box its place among those of its tensor, and its file."""
    every = [tensor.boxes for tensor in manifest.tensors.values()]
    counts = np.array([len(boxes) for boxes in every], dtype=np.int64)
    tensor = np.repeat(np.arange(len(every)), counts)
    place = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets, sizes = np.zeros((len(tensor), most), dtype=np.int64), np.ones((len(tensor), most), dtype=np.int64)
    end = 0
    for boxes in every:
        begin, end = end, end + len(boxes)
        offsets[begin:end, : boxes.num_dims] = np.array(boxes.offsets).reshape(len(boxes), boxes.num_dims)
        sizes[begin:end, : boxes.num_dims] = np.array(boxes.sizes).reshape(len(boxes), boxes.num_dims)
    file_names = sorted({name for boxes in every for name in {boxes.file_names[index] for index in boxes.file}})
    number = {name: index for index, name in enumerate(file_names)}
    file = np.array([number[boxes.file_names[index]] for boxes in every for index in boxes.file], dtype=np.int64)
    start = np.concatenate([np.empty(0, np.int64), *(np.array(boxes.start) for boxes in every)])
    order = np.lexsort((start, file))
    table = BoxTable(tensor, offsets, sizes, num_dims[tensor]).rows(order)
    return table, place[order], [file_names[index] for index in file[order].tolist()]


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

"""From a folder of torch.distributed.checkpoint to a checkpoint of ours, a box in memory at a time."""

from __future__ import annotations

from functools import partial

import torch

from hpc_train.checkpoint.convert.foreign_dcp import ForeignBox, read_box, read_index
from hpc_train.checkpoint.convert.hf_folder import Converted, NotFinite, as_dtype
from hpc_train.checkpoint.convert.weights import write_weights
from hpc_train.checkpoint.format.model_tensors import (
    MODEL_PREFIX,
    STORED_TYPES,
    ModelSpec,
    differences,
    few,
    model_tensors,
)
from hpc_train.checkpoint.format.state import DeferredPiece
from hpc_train.checkpoint.progress import Advance
from hpc_train.checkpoint.stores.location import Location
from hpc_train.errors import CheckpointError
from hpc_train.log import say


def import_dcp(source: Location, target: Location, dtype: str | None, spec: ModelSpec, progress: Advance) -> Converted:
    """A checkpoint of step 0, weights alone, from what `dcp.save({"model": ...})` wrote.

    The names below `model` must be those of ours. What else is there is named and left out.
    """
    boxes, others = read_index(source)
    weights = [box for box in boxes if box.name.startswith(MODEL_PREFIX)]
    _require_model(source, weights, spec)
    if left := sorted({box.name for box in boxes} - {box.name for box in weights}) + others:
        say(f"left out, since it is no weight: {few(left, 5)}")
    odd = NotFinite()
    pieces = [_piece(source, box, dtype, odd) for box in weights]
    num_bytes = sum(piece.box.num_elements * piece.dtype.itemsize for piece in pieces)
    origin = f"torch checkpoint {source.name}"
    write_weights(target, pieces, spec, origin, progress)
    odd.warn()
    count = sum(piece.box.num_elements for piece in pieces)
    types = tuple(sorted({str(piece.dtype).removeprefix("torch.") for piece in pieces}))
    return Converted(target, "from torch's checkpoint", spec, count, num_bytes, types, ())


def _require_model(source: Location, weights: list[ForeignBox], spec: ModelSpec) -> None:
    wanted = {MODEL_PREFIX + name: shape for name, shape in model_tensors(spec).items()}
    if faults := differences(wanted, {box.name: box.shape for box in weights}):
        raise CheckpointError("\n  ".join([f"{source} holds another model than --config says:", *faults]))
    for box in weights:
        if str(box.dtype).removeprefix("torch.") not in STORED_TYPES:
            raise CheckpointError(f"{source}: {box.name} is {box.dtype}; known are {', '.join(STORED_TYPES)}")


def _piece(source: Location, box: ForeignBox, dtype: str | None, odd: NotFinite) -> DeferredPiece:
    kind = getattr(torch, dtype) if dtype else box.dtype
    return DeferredPiece(box.name, box.shape, box.box, kind, partial(_read_as, source, box, kind, odd))


def _read_as(source: Location, box: ForeignBox, dtype: torch.dtype, odd: NotFinite) -> torch.Tensor:
    return as_dtype(odd.show(read_box(source, box), box.name), dtype, box.name)

"""From a checkpoint of ours to one of its weights alone, in one file: for other tools that read torch's layout."""

from __future__ import annotations

import math
import zlib
from functools import partial

import torch

from hpc_train.checkpoint.convert.hf_folder import Converted, NotFinite, as_dtype
from hpc_train.checkpoint.convert.weights import write_weights
from hpc_train.checkpoint.files.boxes import BoxFiles
from hpc_train.checkpoint.files.chunk_reader import damage
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.format.model_tensors import MODEL_PREFIX, ModelSpec, require_model
from hpc_train.checkpoint.format.state import DeferredPiece
from hpc_train.checkpoint.format.stored_boxes import StoredBox
from hpc_train.checkpoint.progress import Advance
from hpc_train.checkpoint.stores.location import Location
from hpc_train.errors import CheckpointError


def export_dcp(
    checkpoint: Location, target: Location, dtype: str | None, spec: ModelSpec, progress: Advance
) -> Converted:
    """A checkpoint of step 0 from the weights of a checkpoint of any mesh, a box in memory at a time."""
    manifest = read_manifest(checkpoint)
    require_model(checkpoint, manifest, spec)
    weights = {name: tensor for name, tensor in manifest.tensors.items() if name.startswith(MODEL_PREFIX)}
    odd = NotFinite()
    pieces = []
    for name, tensor in weights.items():
        stored_kind, kind = getattr(torch, tensor.dtype), getattr(torch, dtype or tensor.dtype)
        for stored in tensor.boxes:
            make = partial(_read, checkpoint, name, stored, stored_kind, kind, odd)
            pieces.append(DeferredPiece(name, tensor.shape, stored.box, kind, make))
    num_bytes = sum(piece.box.num_elements * piece.dtype.itemsize for piece in pieces)
    origin = f"checkpoint {checkpoint.name} of step {manifest.step}"
    write_weights(target, pieces, spec, origin, progress)
    odd.warn()
    count = sum(math.prod(tensor.shape) for tensor in weights.values())
    types = tuple(sorted({str(piece.dtype).removeprefix("torch.") for piece in pieces}))
    return Converted(target, "to one file of torch's layout", spec, count, num_bytes, types, ())


def _read(
    checkpoint: Location, name: str, stored: StoredBox, stored_kind: torch.dtype, kind: torch.dtype, odd: NotFinite
) -> torch.Tensor:
    with BoxFiles(checkpoint) as files:
        raw = files.read(stored.file, stored.start, stored.num_bytes)
    if zlib.crc32(raw.data) != stored.crc32:
        raise CheckpointError(damage(checkpoint, stored))
    tensor = torch.from_numpy(raw).view(stored_kind).view(stored.box.sizes)
    return as_dtype(odd.show(tensor, name), kind, name)

"""From a Hugging Face folder to a checkpoint of ours, a block of rows or one tensor in memory at a time.

Names, shapes and options are compared before a byte is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import torch

from hpc_train.checkpoint.convert import safetensors_files as files
from hpc_train.checkpoint.convert.hf_config import read_hf_config
from hpc_train.checkpoint.convert.hf_folder import (
    CARRIED,
    HF_CONFIG,
    Converted,
    NotFinite,
    as_dtype,
    carry,
    read_json,
)
from hpc_train.checkpoint.convert.hf_names import HEAD, Place, hf_tensors, is_constant, known_prefix, places
from hpc_train.checkpoint.convert.safetensors_files import RawTensor
from hpc_train.checkpoint.convert.weights import write_weights
from hpc_train.checkpoint.files.rows import BLOCK_BYTES, row_blocks
from hpc_train.checkpoint.folders.find import HF_FOLDER
from hpc_train.checkpoint.format.model_tensors import MODEL_PREFIX, ModelSpec, differences, model_tensors
from hpc_train.checkpoint.format.state import DeferredPiece
from hpc_train.checkpoint.progress import Advance
from hpc_train.checkpoint.stores.location import Location
from hpc_train.errors import CheckpointError
from hpc_train.plan.flat import Box


def import_hf(
    source: Location, target: Location, dtype: str | None, ignore: Collection[str], progress: Advance
) -> Converted:
    """A checkpoint of step 0, weights alone, from a Hugging Face folder."""
    spec = read_hf_config(read_json(source / HF_CONFIG), str(source / HF_CONFIG), ignore)
    stored = _agreed_tensors(source, spec)
    shapes = model_tensors(spec)
    dtypes = {name: dtype or stored[place.hf.name].dtype for name, place in places(spec).items()}
    odd = NotFinite()
    pieces = [
        piece
        for name, place in places(spec).items()
        for piece in _pieces(name, shapes[name], place, stored[place.hf.name], dtypes[name], odd)
    ]
    num_bytes = sum(piece.box.num_elements * piece.dtype.itemsize for piece in pieces)
    origin = f"Hugging Face folder {(source.resolved() or source).name}"

    def carry_files(folder: Location) -> tuple[str, ...]:
        (folder / HF_FOLDER).make_folder()
        names = carry(source, folder / HF_FOLDER, (HF_CONFIG, *CARRIED, files.INDEX_FILE))
        (folder / HF_FOLDER).flush()
        return names

    carried = write_weights(target, pieces, spec, origin, progress, carry_files)
    odd.warn()
    count = sum(piece.box.num_elements for piece in pieces)
    return Converted(target, "from Hugging Face", spec, count, num_bytes, tuple(sorted({*dtypes.values()})), carried)


def _agreed_tensors(source: Location, spec: ModelSpec) -> dict[str, RawTensor]:
    """The stored tensors by Hugging Face's full names, once they are those of the model."""
    present = files.read_folder(source)
    prefix = known_prefix(present, spec.model.family)
    stored = {
        name if name == HEAD else prefix + name: tensor for name, tensor in present.items() if not is_constant(name)
    }
    files.require_types(stored)
    wanted = hf_tensors(spec)
    if HEAD in stored and HEAD not in wanted:
        _require_tied(source, stored[HEAD], stored.get(wanted_embedding(spec)))
        del stored[HEAD]
    faults = differences(
        {name: hf.shape for name, hf in wanted.items()}, {name: tensor.shape for name, tensor in stored.items()}
    )
    if faults:
        if HEAD in wanted and HEAD not in stored:
            faults.append(f"a model without {HEAD} has tie_word_embeddings=true in its {HF_CONFIG}")
        raise CheckpointError("\n  ".join([f"{source}: the tensors are not those of its {HF_CONFIG}:", *faults]))
    return stored


def wanted_embedding(spec: ModelSpec) -> str:
    return places(spec)["embedding.weight"].hf.name


def _require_tied(source: Location, head: RawTensor, embedding: RawTensor | None) -> None:
    """A tied model's file may hold the head as well, if it is the embedding."""
    if embedding is not None and head.dtype != embedding.dtype:
        raise CheckpointError(
            f"{source}: tie_word_embeddings is true, but {HEAD} is stored as {head.dtype} and the embedding as "
            f"{embedding.dtype}. If the model has a head of its own, set tie_word_embeddings to false in its "
            f"{HF_CONFIG}; if not, leave {HEAD} out of the file."
        )
    if embedding is None or head.shape != embedding.shape:
        same = False
    else:
        blocks = [(at, min(BLOCK_BYTES, head.num_bytes - at)) for at in range(0, head.num_bytes, BLOCK_BYTES)]
        same = all(head.read(*block) == embedding.read(*block) for block in blocks)
    if not same:
        raise CheckpointError(
            f"{source}: tie_word_embeddings is true, but {HEAD} is not equal to the embedding. If the model has a head "
            f"of its own, set tie_word_embeddings to false in its {HF_CONFIG}."
        )


def _pieces(
    name: str, shape: tuple[int, ...], place: Place, stored: RawTensor, dtype: str, odd: NotFinite
) -> Iterator[DeferredPiece]:
    """Boxes of a tensor of ours: blocks of rows; a transposed one whole, since its rows are columns there."""
    is_cut = len(shape) == 2 and not place.hf.is_transposed
    blocks = row_blocks(shape, 4) if is_cut else [(0, shape[0])]
    kind = getattr(torch, dtype)
    for start, stop in blocks:
        box = Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))
        make = partial(_from_hf, name, place, stored, (start, stop), kind, odd)
        yield DeferredPiece(MODEL_PREFIX + name, shape, box, kind, make)


def _from_hf(
    name: str, place: Place, stored: RawTensor, rows: tuple[int, int], dtype: torch.dtype, odd: NotFinite
) -> torch.Tensor:
    """Rows of a tensor of ours, from the first one to before the last."""
    if place.hf.is_transposed:
        found = _columns(stored, place.start, place.stop).t()
    elif len(stored.shape) == 1:
        found = _rows(stored, place.start, place.stop)
    else:
        found = _rows(stored, *rows)
    return as_dtype(odd.show(found, place.hf.name), dtype, name).contiguous()


def _columns(stored: RawTensor, start: int, stop: int) -> torch.Tensor:
    """Columns start .. stop of a matrix, gathered from blocks of its rows."""
    columns = torch.empty((stored.shape[0], stop - start), dtype=getattr(torch, stored.dtype))
    for first, last in row_blocks(stored.shape, 4):
        columns[first:last] = _rows(stored, first, last)[:, start:stop]
    return columns


def _rows(stored: RawTensor, start: int, stop: int) -> torch.Tensor:
    row_bytes = stored.num_bytes // stored.shape[0]
    raw = stored.read(start * row_bytes, (stop - start) * row_bytes)
    return torch.frombuffer(raw, dtype=getattr(torch, stored.dtype)).view(stop - start, *stored.shape[1:])

"""From a checkpoint of ours, of any mesh, to a Hugging Face folder; one tensor or block of rows in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch

from hpc_train.checkpoint.convert import safetensors_files as files
from hpc_train.checkpoint.convert.hf_config import require_hf_can_say, write_hf_config
from hpc_train.checkpoint.convert.hf_folder import (
    CARRIED,
    HF_CONFIG,
    Converted,
    NotFinite,
    as_dtype,
    carry,
    read_json,
    renamed_when_done,
    require_room,
)
from hpc_train.checkpoint.convert.hf_names import HfTensor, hf_tensors
from hpc_train.checkpoint.convert.safetensors_files import Entry
from hpc_train.checkpoint.files.rows import read_rows, read_whole
from hpc_train.checkpoint.folders.find import HF_FOLDER
from hpc_train.checkpoint.format.manifest import Manifest, read_manifest
from hpc_train.checkpoint.format.model_tensors import MODEL_PREFIX, STORED_TYPES, ModelSpec, require_model
from hpc_train.checkpoint.progress import Advance
from hpc_train.checkpoint.stores.location import Location, Place, copy_file, locate
from hpc_train.errors import ConfigError


def export_hf(
    checkpoint: Location,
    target: Location,
    dtype: str | None,
    spec: ModelSpec,
    max_shard_bytes: int | None,
    tokenizer: Place | None,
    progress: Advance,
) -> Converted:
    """A Hugging Face folder from the weights of a checkpoint."""
    require_hf_can_say(spec.model)
    manifest = read_manifest(checkpoint)
    require_model(checkpoint, manifest, spec)
    odd = NotFinite()
    entries = [_entry(checkpoint, manifest, hf, dtype, odd) for hf in hf_tensors(spec).values()]
    num_bytes = sum(entry.num_bytes for entry in entries)
    require_room(target, num_bytes, "the model")
    kept = checkpoint / HF_FOLDER
    given = locate(tokenizer) if tokenizer is not None else None
    # Nothing is asked for below a file: HDFS refuses that to plain users.
    of_given = [given] if given is not None and not given.is_file() else []
    configs = [folder / HF_CONFIG for folder in (kept, *of_given)]
    base = next((read_json(path) for path in configs if path.is_file()), None)
    dtypes = sorted({entry.dtype for entry in entries}, key=STORED_TYPES.index)
    with renamed_when_done(target) as temporary:
        progress.expect(num_bytes)
        files.write_folder(temporary, _shards(entries, kept, max_shard_bytes), progress)
        files.write_json(temporary / HF_CONFIG, write_hf_config(spec, dtypes[0], base))
        of_tokenizer = _tokenizer_files(given) if given is not None else {}
        carried = carry(kept, temporary, [name for name in CARRIED if name not in of_tokenizer])
        for name, source in of_tokenizer.items():
            copy_file(source, temporary / name)
        carried = tuple(sorted({*carried, *of_tokenizer})) if of_tokenizer else carried
    odd.warn()
    count = sum(math.prod(entry.shape) for entry in entries)
    return Converted(target, "to Hugging Face", spec, count, num_bytes, tuple(dtypes), carried)


def _entry(checkpoint: Location, manifest: Manifest, hf: HfTensor, dtype: str | None, odd: NotFinite) -> Entry:
    stored = [manifest.tensors[MODEL_PREFIX + part].dtype for part in hf.parts]
    # q, k and v that lie in one tensor there share its type: the widest, though ours are always alike.
    written = dtype or min(stored, key=STORED_TYPES.index)
    blocks = partial(_hf_blocks, checkpoint, manifest, hf, getattr(torch, written), odd)
    return Entry(hf.name, written, hf.shape, blocks)


def _hf_blocks(
    checkpoint: Location, manifest: Manifest, hf: HfTensor, dtype: torch.dtype, odd: NotFinite
) -> Iterator[memoryview]:
    """The bytes of a tensor as Hugging Face stores it."""
    names = [MODEL_PREFIX + part for part in hf.parts]
    if len(names) == 1 and not hf.is_transposed:
        for block in read_rows(checkpoint, names[0], manifest.tensors[names[0]]):
            yield _raw(as_dtype(odd.show(block, names[0]), dtype, names[0]))
        return
    whole = torch.empty(hf.shape, dtype=dtype)
    column = 0
    for name in names:
        stored = odd.show(read_whole(checkpoint, name, manifest.tensors[name]), name)
        part = as_dtype(stored, dtype, name)
        part = part.t() if hf.is_transposed else part
        whole[..., column : column + part.shape[-1]] = part
        column += part.shape[-1]
    yield _raw(whole)


def _raw(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _shards(entries: list[Entry], kept: Location, max_bytes: int | None) -> list[list[Entry]]:
    """Files as they were where the model came from, unless a size is given; else by size."""
    index = files.read_index(kept) if max_bytes is None else None
    if index is None or set(index) != {entry.name for entry in entries}:
        came_single = max_bytes is None and (kept / HF_CONFIG).is_file() and index is None
        return [entries] if came_single else files.split_shards(entries, max_bytes or 5 * 10**9)
    names = sorted(set(index.values()))
    return [[entry for entry in entries if index[entry.name] == name] for name in names]


def _tokenizer_files(tokenizer: Location) -> dict[str, Location]:
    """By the name that they get."""
    if tokenizer.is_file():
        return {"tokenizer.json": tokenizer}
    found = {name: tokenizer / name for name in CARRIED if (tokenizer / name).is_file()}
    if not found:
        raise ConfigError(f"--tokenizer {tokenizer} has none of the files {', '.join(CARRIED)}")
    return found

"""`ckpt convert`: which way, which files, and what has no effect there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from hpc_train.checkpoint.convert.foreign_dcp import is_foreign_dcp
from hpc_train.checkpoint.convert.from_dcp import import_dcp
from hpc_train.checkpoint.convert.from_hf import import_hf
from hpc_train.checkpoint.convert.hf_folder import HF_CONFIG, Converted
from hpc_train.checkpoint.convert.to_dcp import export_dcp
from hpc_train.checkpoint.convert.to_hf import export_hf
from hpc_train.checkpoint.folders.find import find_checkpoint, is_checkpoint, read_model, told_model
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.format.model_function import require_function
from hpc_train.checkpoint.format.model_tensors import ModelSpec, require_model
from hpc_train.checkpoint.progress import UNHEARD, Advance
from hpc_train.checkpoint.stores.location import Location, Place, locate
from hpc_train.errors import ConfigError, HpcTrainError
from hpc_train.log import warn

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def convert(
    source: Place,
    target: Place,
    *,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    config: str | None = None,
    tokenizer: Place | None = None,
    ignore: Collection[str] = (),
    to: str | None = None,
    progress: Advance = UNHEARD,
) -> Converted:
    """Convert a Hugging Face folder to a checkpoint, or a checkpoint, or a run's newest, to a Hugging Face folder.

    A folder of torch.distributed.checkpoint is converted to a checkpoint; `config` must name its model. Source and
    target may lie in any store.

    Args:
        dtype: fp32, bf16 or fp16; None keeps each tensor's.
        max_shard_bytes: where files of a Hugging Face folder are cut; None: as the model came, else at 5 GB.
        config: the configuration of a checkpoint that does not lie in its run folder, or of torch's checkpoint.
        tokenizer: a Hugging Face folder or a tokenizer.json whose files go along to a Hugging Face folder.
        ignore: keys of config.json that change nothing.
        to: of a checkpoint of ours: hf (None as well), or dcp, one file of torch's layout.
        progress: told of the bytes that are written.

    Raises:
        CheckpointError: the source is damaged, or of a model that the other side does not have.
        ConfigError: the target exists or lies inside a model's folder, or an option has no effect in this direction.
    """
    into, folder = locate(target), locate(source)
    if into.entry() is not None:
        raise ConfigError(f"{into} exists; give a name that does not, or remove it first")
    _refuse_within(into, "a checkpoint", is_checkpoint)
    chosen = DTYPES[dtype] if dtype else None
    of_hf: dict[str, Any] = {"--tokenizer": tokenizer, "--max-shard-size": max_shard_bytes, "--ignore": ignore}
    if is_hf_folder(folder):
        given = {"--config": config, "--tokenizer": tokenizer, "--max-shard-size": max_shard_bytes, "--to": to}
        _refuse_without_effect(given, "from a Hugging Face folder")
        _refuse_inside_source(into, folder)
        return import_hf(folder, into, chosen, ignore, progress)
    if is_foreign_dcp(folder) and not is_checkpoint(folder):
        _refuse_without_effect({**of_hf, "--to": to}, "from a checkpoint of torch")
        if config is None:
            raise ConfigError(
                f"{source} is a checkpoint of torch, which does not say of which model: name it by --config"
            )
        _refuse_inside_source(into, folder)
        return import_dcp(folder, into, chosen, read_model(source, config), progress)
    checkpoint = find_checkpoint(source)
    _refuse_inside_source(into, folder)
    spec = read_model(checkpoint, config)
    if config is not None:
        _compare(checkpoint, spec)
    if to == "dcp":
        _refuse_without_effect(of_hf, "to a checkpoint of torch")
        return replace(export_dcp(checkpoint, into, chosen, spec, progress), checkpoint=checkpoint)
    _refuse_without_effect({"--ignore": ignore}, "to a Hugging Face folder")
    done = export_hf(checkpoint, into, chosen, spec, max_shard_bytes, tokenizer, progress)
    return replace(done, checkpoint=checkpoint)


def _compare(checkpoint: Location, spec: ModelSpec) -> None:
    """Refuse --config where the checkpoint itself says that it is of another model."""
    manifest = read_manifest(checkpoint)
    require_model(checkpoint, manifest, spec)
    try:
        told = told_model(checkpoint, manifest)
    except HpcTrainError as problem:
        warn(f"{problem}; --config is used")
        return
    if told is not None:
        require_function(checkpoint, told, spec, allowed=None)


def is_hf_folder(folder: Location) -> bool:
    return (folder / HF_CONFIG).is_file() and not is_checkpoint(folder)


def _refuse_within(target: Location, what: str, is_it: Callable[[Location], bool]) -> None:
    """Nothing is written into a folder whose files are a model: it would be another one afterwards."""
    whole = target.resolved()
    above = target.parent if whole is None else Location(target.store, str(whole.parent))
    while above.path != above.parent.path:
        if above.is_folder() and is_it(above):
            raise ConfigError(f"{target} lies inside {what}, {above}; give a place outside of it")
        above = above.parent


def _refuse_inside_source(target: Location, source: Location) -> None:
    _refuse_within(target, "the folder to convert", lambda above: _is_same(above, source))


def _is_same(one: Location, other: Location) -> bool:
    here, there = one.local, other.local
    if here is None or there is None:
        return one == other
    return one.carry_out(f"compare {other} with", lambda: here.samefile(there))


def _refuse_without_effect(given: Mapping[str, Any], direction: str) -> None:
    if names := [name for name, value in given.items() if value]:
        raise ConfigError(f"{', '.join(names)} has no effect on the way {direction}; leave it out")

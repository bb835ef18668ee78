"""`ckpt convert`: which way, which files, and what has no effect there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.find import find_checkpoint, is_checkpoint, read_model
from hpc_train.checkpoint.foreign_dcp import is_foreign_dcp
from hpc_train.checkpoint.from_dcp import import_dcp
from hpc_train.checkpoint.from_hf import import_hf
from hpc_train.checkpoint.hf_folder import HF_CONFIG, Converted
from hpc_train.checkpoint.location import Place, locate
from hpc_train.checkpoint.to_hf import export_hf
from hpc_train.errors import ConfigError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def convert(
    source: Place,
    target: Place,
    *,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    config: str | None = None,
    tokenizer: Path | None = None,
    ignore: Collection[str] = (),
) -> Converted:
    """Convert a Hugging Face folder to a checkpoint, or a checkpoint, or a run's newest, to a Hugging Face folder.

    A folder of torch.distributed.checkpoint is converted to a checkpoint; `config` must name its model.

    Args:
        dtype: fp32, bf16 or fp16; None keeps each tensor's.
        max_shard_bytes: where files of a Hugging Face folder are cut; None: as the model came, else at 5 GB.
        config: the configuration of a checkpoint that does not lie in its run folder, or of torch's checkpoint.
        tokenizer: a Hugging Face folder or a tokenizer.json whose files go along to a Hugging Face folder.
        ignore: keys of config.json that change nothing.

    Raises:
        CheckpointError: the source is damaged, or of a model that the other side does not have.
        ConfigError: the target exists or lies inside a model's folder, or an option has no effect in this direction.
    """
    into = locate(target).local
    if into is None:
        raise ConfigError(f"{target}: convert writes to local folders; copy it from there (`hdfs dfs -put`)")
    if into.exists():
        raise ConfigError(f"{into} exists; give a name that does not, or remove it first")
    _refuse_within(into, "a checkpoint", lambda folder: is_checkpoint(locate(folder)))
    chosen = DTYPES[dtype] if dtype else None
    folder = locate(source).local
    if folder is not None and is_hf_folder(folder):
        given = {"--config": config, "--tokenizer": tokenizer, "--max-shard-size": max_shard_bytes}
        _refuse_without_effect(given, "from a Hugging Face folder")
        _refuse_within(into, "the folder to convert", folder.samefile)
        return import_hf(folder, into, chosen, ignore)
    if is_foreign_dcp(locate(source)) and not is_checkpoint(locate(source)):
        unused = {"--tokenizer": tokenizer, "--max-shard-size": max_shard_bytes, "--ignore": ignore or None}
        _refuse_without_effect(unused, "from a checkpoint of torch")
        if config is None:
            raise ConfigError(
                f"{source} is a checkpoint of torch, which does not say of which model: name it by --config"
            )
        if folder is not None:
            _refuse_within(into, "the folder to convert", folder.samefile)
        return import_dcp(locate(source), into, chosen, read_model(source, config))
    checkpoint = find_checkpoint(source)
    _refuse_without_effect({"--ignore": ignore}, "to a Hugging Face folder")
    return export_hf(checkpoint, into, chosen, read_model(checkpoint, config), max_shard_bytes, tokenizer)


def is_hf_folder(path: Path) -> bool:
    return (path / HF_CONFIG).is_file() and not is_checkpoint(locate(path))


def _refuse_within(target: Path, what: str, is_it: Callable[[Path], bool]) -> None:
    """Nothing is written into a folder whose files are a model: it would be another one afterwards."""
    for above in target.resolve().parents:
        if above.is_dir() and is_it(above):
            raise ConfigError(f"{target} lies inside {what}, {above}; give a place outside of it")


def _refuse_without_effect(given: Mapping[str, Any], direction: str) -> None:
    if names := [name for name, value in given.items() if value]:
        raise ConfigError(f"{', '.join(names)} has no effect on the way {direction}; leave it out")

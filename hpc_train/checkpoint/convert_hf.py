"""`ckpt convert`: which way, which files, and what has no effect there."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.find import find_checkpoint, is_checkpoint, read_model
from hpc_train.checkpoint.from_hf import import_hf
from hpc_train.checkpoint.hf_folder import HF_CONFIG, Converted
from hpc_train.checkpoint.to_hf import export_hf
from hpc_train.errors import ConfigError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def convert(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    config: str | None = None,
    tokenizer: Path | None = None,
    ignore: Collection[str] = (),
) -> Converted:
    """Convert a Hugging Face folder to a checkpoint, or a checkpoint, or a run's newest, to a Hugging Face folder.

    Args:
        dtype: fp32, bf16 or fp16; None keeps each tensor's.
        max_shard_bytes: where files of a Hugging Face folder are cut; None: as the model came, else at 5 GB.
        config: the configuration of a checkpoint that does not lie in its run folder.
        tokenizer: a Hugging Face folder or a tokenizer.json whose files go along to a Hugging Face folder.
        ignore: keys of config.json that change nothing.

    Raises:
        CheckpointError: the source is damaged, or of a model that the other side does not have.
        ConfigError: the target exists, or an option has no effect in this direction.
    """
    if target.exists():
        raise ConfigError(f"{target} exists; give a name that does not, or remove it first")
    chosen = DTYPES[dtype] if dtype else None
    if is_hf_folder(source):
        given = {"--config": config, "--tokenizer": tokenizer, "--max-shard-size": max_shard_bytes}
        _refuse_without_effect(given, "from a Hugging Face folder")
        return import_hf(source, target, chosen, ignore)
    checkpoint = find_checkpoint(source)
    _refuse_without_effect({"--ignore": ignore}, "to a Hugging Face folder")
    return export_hf(checkpoint, target, chosen, read_model(checkpoint, config), max_shard_bytes, tokenizer)


def is_hf_folder(path: Path) -> bool:
    return (path / HF_CONFIG).is_file() and not is_checkpoint(path)


def _refuse_without_effect(given: dict[str, Any], direction: str) -> None:
    if names := [name for name, value in given.items() if value]:
        raise ConfigError(f"{', '.join(names)} has no effect on the way {direction}; leave it out")

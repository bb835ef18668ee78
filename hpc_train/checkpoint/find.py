"""Find a checkpoint from what a user names, and which model it is of. Needs no torch."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from hpc_train.checkpoint.folder import sound_checkpoints, steps_newest_first
from hpc_train.checkpoint.manifest import MANIFEST_FILE
from hpc_train.checkpoint.model_tensors import ModelSpec
from hpc_train.config import Config, ModelConfig, load_config, parse_yaml
from hpc_train.errors import CheckpointError
from hpc_train.plan.run_files import CHECKPOINTS_FOLDER, CONFIG_FILE

MODEL_FILE = "model.yaml"
"""Beside a converted checkpoint: its sections `model` and `data.seq_len`, for a configuration."""
HF_FOLDER = "hf"
"""In a converted checkpoint: config.json, tokenizer files and the index that the model came with."""


def is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST_FILE).is_file()


def checkpoints_folder(path: Path) -> Path:
    """The folder with the step_N folders: a run folder's own, or the path itself."""
    below = path / CHECKPOINTS_FOLDER
    return below if below.is_dir() else path


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that is meant: the folder itself, or the newest sound one of a run.

    Raises:
        CheckpointError: there is none.
    """
    if is_checkpoint(path):
        return path
    root = checkpoints_folder(path)
    for _, found in sound_checkpoints(root):
        return found
    names = [found.name for _, found in steps_newest_first(root)]
    if names:
        raise CheckpointError(f"{root} holds {', '.join(names)}, but none that is whole; the reasons are above")
    what = "is no checkpoint, and holds none" if path.exists() else "does not exist"
    raise CheckpointError(
        f"{path} {what}. Give a checkpoint (a folder with {MANIFEST_FILE}), or a run folder with {CHECKPOINTS_FOLDER}/."
    )


def read_model(checkpoint: Path, config: str | None = None) -> ModelSpec:
    """The model of a checkpoint: from `config`, from its own model.yaml, or from the configuration of its run.

    Raises:
        ConfigError: the file found is no configuration.
        CheckpointError: there is none of these.
    """
    if config is not None:
        return _of_config(load_config(config))
    if (checkpoint / MODEL_FILE).is_file():
        return _read_model_file(checkpoint / MODEL_FILE)
    of_run = checkpoint.resolve().parent.parent / CONFIG_FILE
    if of_run.is_file():
        return _of_config(load_config(of_run))
    raise CheckpointError(
        f"{checkpoint} does not say of which model it is: there is neither {MODEL_FILE} in it nor {of_run}. "
        "Name its configuration with --config."
    )


def write_model_file(path: Path, spec: ModelSpec, origin: str) -> None:
    tree = {"model": spec.model.model_dump(mode="json", exclude_none=True), "data": {"seq_len": spec.max_seq_len}}
    note = (
        "the size of the table of positions" if spec.model.family == "gpt" else "the longest sequence it was made for"
    )
    text = f"# Of {origin}; data.seq_len is {note}.\n{yaml.safe_dump(tree, sort_keys=False)}"
    path.write_text(text, encoding="utf-8")


def _of_config(config: Config) -> ModelSpec:
    return ModelSpec(config.model, config.data.seq_len)


def _read_model_file(path: Path) -> ModelSpec:
    tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    try:
        return ModelSpec(ModelConfig.model_validate(tree["model"]), int(tree["data"]["seq_len"]))
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None

"""Find a checkpoint from what a user names, and which model it is of. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hpc_train.checkpoint.folders.folder import sound_checkpoints, steps_newest_first
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, Manifest, read_manifest
from hpc_train.checkpoint.format.model_tensors import ModelSpec
from hpc_train.checkpoint.stores.location import Location, Place, locate
from hpc_train.config import Config, ModelConfig
from hpc_train.config_read import load_config
from hpc_train.config_text import parse_yaml
from hpc_train.errors import CheckpointError
from hpc_train.plan.run_files import CHECKPOINTS_FOLDER, CONFIG_FILE, read_checkpoints_note

MODEL_FILE = "model.yaml"
"""Beside a converted checkpoint: its sections `model` and `data.seq_len`, for a configuration."""
HF_FOLDER = "hf"
"""In a converted checkpoint: config.json, tokenizer files and the index that the model came with."""
CONFIG_VALUE = "config"
"""In a manifest's values: the configuration of the run that saved it."""
_GIVE = f"Give a checkpoint (a folder with {MANIFEST_FILE}), or a run folder with {CHECKPOINTS_FOLDER}/."


def is_checkpoint(path: Location) -> bool:
    return (path / MANIFEST_FILE).is_file()


def checkpoints_folder(place: Place) -> Location:
    """The folder with the step_N folders: where a run folder says that they are, or the place itself."""
    path = locate(place)
    if path.local is None:
        return path
    run_dir = path.local
    note = path.carry_out("look for the checkpoints of", lambda: read_checkpoints_note(run_dir))
    if note is not None:
        return locate(note.folder, path.store.patience)
    below = path / CHECKPOINTS_FOLDER
    return below if below.is_folder() else path


def find_checkpoint(place: Place) -> Location:
    """The checkpoint that is meant: the folder itself, or the newest sound one of a run.

    Raises:
        CheckpointError: there is none.
    """
    path = locate(place)
    found = path.entry()
    if found is not None and not found.is_folder:
        raise CheckpointError(f"{path} is no folder. {_GIVE}")
    if is_checkpoint(path):
        return path
    root = checkpoints_folder(path)
    for newest, _ in sound_checkpoints(root):
        return newest
    names = [there.name for _, there in steps_newest_first(root)]
    if names:
        raise CheckpointError(f"{root} holds {', '.join(names)}, but none that is whole; the reasons are above")
    raise CheckpointError(f"{path} {'is no checkpoint, and holds none' if found else 'does not exist'}. {_GIVE}")


def read_model(place: Place, config: str | None = None) -> ModelSpec:
    """The model of a checkpoint: from `config`, from its own files, or from the configuration of its run.

    Raises:
        ConfigError: the file found is no configuration.
        CheckpointError: there is none of these.
    """
    checkpoint = locate(place)
    if config is not None:
        return _of_config(load_config(config))
    told = told_model(checkpoint, read_manifest(checkpoint))
    if told is not None:
        return told
    of_run = _config_of_run(checkpoint)
    where = f" nor {of_run}" if of_run is not None else ""
    raise CheckpointError(
        f"{checkpoint} does not say of which model it is: there is neither {MODEL_FILE} in it{where}. "
        "Name its configuration with --config."
    )


def told_model(checkpoint: Location, manifest: Manifest) -> ModelSpec | None:
    """The model of a checkpoint as its own files or its run tell; None where nobody does.

    Raises: as `read_model`.
    """
    if (checkpoint / MODEL_FILE).is_file():
        text = (checkpoint / MODEL_FILE).read_text()
        return _of_tree(parse_yaml(text, str(checkpoint / MODEL_FILE)), checkpoint / MODEL_FILE)
    told = model_of_values(manifest.values, checkpoint)
    if told is not None:
        return told
    of_run = _config_of_run(checkpoint)
    if of_run is None:
        return None

    def read() -> ModelSpec | None:
        return _of_config(load_config(of_run)) if of_run.is_file() else None

    return checkpoint.carry_out("read the configuration of the run of", read)


def model_of_values(values: Mapping[str, Any], checkpoint: Location) -> ModelSpec | None:
    """The model in the plain values of a checkpoint; None where they do not tell it.

    Raises:
        CheckpointError: they cannot be used.
    """
    told = values.get(CONFIG_VALUE)
    return None if told is None else _of_tree(told, checkpoint / MANIFEST_FILE)


def _config_of_run(checkpoint: Location) -> Path | None:
    """Where the configuration of its run lies, if it lies in a run folder."""
    whole = checkpoint.resolved()
    return whole.parent.parent / CONFIG_FILE if whole is not None else None


def write_model_file(place: Place, spec: ModelSpec, origin: str) -> None:
    note = (
        "the size of the table of positions" if spec.model.family == "gpt" else "the longest sequence it was made for"
    )
    tree = {"model": spec.model.model_dump(mode="json", exclude_none=True), "data": {"seq_len": spec.max_seq_len}}
    text = f"# Of {origin}; data.seq_len is {note}.\n{yaml.safe_dump(tree, sort_keys=False)}"
    locate(place).write_text(text)


def _of_config(config: Config) -> ModelSpec:
    return ModelSpec(config.model, config.data.seq_len)


def _of_tree(tree: Any, path: Location) -> ModelSpec:
    try:
        return ModelSpec(ModelConfig.model_validate(tree["model"]), int(tree["data"]["seq_len"]))
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None

"""Which tensors a model has, under their global names, without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpc_train.checkpoint.format.manifest import Manifest
from hpc_train.checkpoint.stores.location import Location
from hpc_train.config import ModelConfig
from hpc_train.errors import CheckpointError
from hpc_train.plan.parameters import UNSPLIT, ModelPart, plan_parameters

MODEL_PREFIX = "model."
"""Before a parameter's name in a checkpoint."""

STORED_TYPES = ("float32", "bfloat16", "float16")
"""Types of weights that are read and written, by torch's names."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelSpec:
    """A model, and the longest sequence that it takes: for gpt the rows of its table of positions."""

    model: ModelConfig
    max_seq_len: int


def model_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Unpadded global shapes by name, in the model's order. A tied head has no tensor of its own."""
    whole = ModelPart.whole(spec.model)
    return {plan.name: plan.shape for plan in plan_parameters(spec.model, spec.max_seq_len, whole, UNSPLIT)}


def require_model(checkpoint: Location, manifest: Manifest, spec: ModelSpec) -> None:
    """Refuse a checkpoint whose weights are not those of the model, with the names and shapes that differ."""
    wanted = {MODEL_PREFIX + name: shape for name, shape in model_tensors(spec).items()}
    found = {name: tensor.shape for name, tensor in manifest.tensors.items() if name.startswith(MODEL_PREFIX)}
    if faults := differences(wanted, found):
        raise CheckpointError("\n  ".join([f"{checkpoint} holds another model than the configuration says:", *faults]))
    if foreign := [name for name in wanted if manifest.tensors[name].dtype not in STORED_TYPES]:
        raise CheckpointError(
            f"{checkpoint}: {foreign[0]} is {manifest.tensors[foreign[0]].dtype}, not of a known type"
        )


def differences(wanted: Mapping[str, Shape], found: Mapping[str, Shape]) -> list[str]:
    """In words: what is missing, what is too much, and whose shape is another."""
    faults = []
    if missing := [name for name in wanted if name not in found]:
        faults.append(f"missing: {few(missing)}")
    if extra := [name for name in found if name not in wanted]:
        faults.append(f"not of this model: {few(extra)}")
    shapes = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    return [*faults, *([f"wrong shapes: {few(shapes)}"] if shapes else [])]


def few(names: list[str], most: int = 20) -> str:
    """Names for a message: all, or the first ones and how many there are."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])}, ... ({len(names)} in all)"

"""Which tensors a model has, under their global names, without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_train.checkpoint.manifest import Manifest
from hpc_train.config import ModelConfig
from hpc_train.errors import CheckpointError

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
    model, h = spec.model, spec.model.hidden_size
    is_gpt = model.family == "gpt"
    tensors: dict[str, Shape] = {"embedding.weight": (model.vocab_size, h)}
    if is_gpt:
        tensors["positions.weight"] = (spec.max_seq_len, h)
    for layer in range(model.num_layers):
        tensors |= {f"layers.{layer}.{name}": shape for name, shape in _layer_tensors(model).items()}
    tensors |= _with_bias("norm", (h,), is_gpt)
    if not model.tied_embeddings:
        tensors["head.weight"] = (model.vocab_size, h)
    return tensors


def _layer_tensors(model: ModelConfig) -> dict[str, Shape]:
    is_gpt, h, kv = model.family == "gpt", model.hidden_size, model.kv_heads * model.head_size
    weights: dict[str, Shape] = {
        "attention_norm": (h,),
        "attention.q": (h, h),
        "attention.k": (kv, h),
        "attention.v": (kv, h),
        "attention.out": (h, h),
        "ffn_norm": (h,),
    }
    if not is_gpt:
        weights["ffn.gate"] = (model.ffn_size, h)
    weights |= {"ffn.up": (model.ffn_size, h), "ffn.down": (h, model.ffn_size)}
    tensors: dict[str, Shape] = {}
    for name, shape in weights.items():
        tensors |= _with_bias(name, shape, is_gpt)
    return tensors


def _with_bias(name: str, shape: Shape, has_bias: bool) -> dict[str, Shape]:
    weight = {f"{name}.weight": shape}
    return weight | {f"{name}.bias": shape[:1]} if has_bias else weight


def require_model(checkpoint: Path, manifest: Manifest, spec: ModelSpec) -> None:
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

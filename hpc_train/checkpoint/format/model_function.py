"""What of a model changes what it computes, and no tensor's name or shape: the same weights, another model. No torch.

Shapes do not tell 4 heads of 16 from 2 of 32. So what a checkpoint says of its model is compared with the
configuration, as far as it bears on sequences of the run's length.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hpc_train.checkpoint.format.model_tensors import ModelSpec
from hpc_train.checkpoint.stores.location import Location
from hpc_train.errors import CheckpointError

CHANGEABLE = ("rope_theta", "attention_window", "norm_eps")
"""What one may train on with on purpose, as checkpoint.allow_changed_model says. Weights do not fit other heads."""


def require_function(
    checkpoint: Location, there: ModelSpec, here: ModelSpec, allowed: Collection[str] | None
) -> list[str]:
    """Refuse a checkpoint whose weights would compute something else in this model than where they were trained.

    allowed: names in the section `model` that may differ (checkpoint.allow_changed_model); None: nothing ever may.

    Returns:
        What differs and is allowed, in words.

    Raises:
        CheckpointError: with all that differs and is not allowed.
    """
    found, wanted = _function(there, here.max_seq_len), _function(here, here.max_seq_len)
    differing = {name: _words(name, found[name], wanted[name]) for name in wanted if found[name] != wanted[name]}
    refused = [name for name in differing if name not in (allowed or ())]
    if refused:
        listed = "\n  ".join(["", *(differing[name] for name in refused)])
        raise CheckpointError(
            f"{checkpoint} has weights of these shapes, but they were trained as another model:{listed}\n"
            f"Take the section `model` that they were trained with{_way_out(refused, allowed)}."
        )
    return list(differing.values())


def _way_out(refused: Collection[str], allowed: Collection[str] | None) -> str:
    changeable = [name for name in CHANGEABLE if name in refused]
    if allowed is None or not changeable:
        return ""
    names = ",".join(name for name in CHANGEABLE if name in {*changeable, *allowed})
    return f", or train on with what is meant to differ: checkpoint.allow_changed_model=[{names}]"


def _function(spec: ModelSpec, seq_len: int) -> dict[str, Any]:
    """What decides the function and no shape, by its name in the section `model`, for sequences of up to seq_len."""
    model = spec.model
    return {
        "num_heads": model.num_heads,
        "num_kv_heads": model.kv_heads,
        "block": model.block,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta if model.family == "llama" else None,
        # A window that is wider than any sequence is none.
        "attention_window": tuple(None if size is None or size >= seq_len else size for size in model.windows),
    }


def _words(name: str, found: Any, wanted: Any) -> str:
    if name != "attention_window":
        return f"model.{name} is {found} there and {wanted} here"
    layers = [layer for layer, sizes in enumerate(zip(found, wanted, strict=True)) if sizes[0] != sizes[1]]
    first = layers[0]
    there, here = ("none" if sizes[first] is None else sizes[first] for sizes in (found, wanted))
    more = f", and {len(layers) - 1} more layers differ" if len(layers) > 1 else ""
    return f"model.{name} is {there} there and {here} here in layer {first}{more}"

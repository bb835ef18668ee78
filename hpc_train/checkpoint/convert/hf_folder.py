"""What both ways of a conversion share: the folder's other files, a type change that loses no number, the rename."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from hpc_train.checkpoint.convert.safetensors_files import BYTE_ORDER_MARK
from hpc_train.checkpoint.format.model_tensors import ModelSpec
from hpc_train.checkpoint.stores.cause import StoreError
from hpc_train.checkpoint.stores.location import Location, copy_file
from hpc_train.cluster.limits import require_free_bytes
from hpc_train.errors import CheckpointError
from hpc_train.log import warn

HF_CONFIG = "config.json"
# Beside the weights in a Hugging Face folder: what a tokenizer and a generation are made of.
CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class Converted:
    """What was written. dtypes: the types of its tensors, by torch's names. checkpoint: of ours, that was read."""

    target: Location
    direction: str
    spec: ModelSpec
    num_parameters: int
    num_bytes: int
    dtypes: tuple[str, ...]
    carried: tuple[str, ...]
    checkpoint: Location | None = None


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """The tensor in another type; a number that the type cannot hold is refused, not made infinite."""
    converted = tensor.to(dtype)
    if tensor.dtype == dtype or dtype == torch.float32:
        return converted
    # Least and largest first: they need no further memory, and say all unless there are infinities or NaN.
    ends = torch.stack(converted.aminmax())
    if not bool(ends.isfinite().all()) and bool((converted.isinf() & ~tensor.isinf()).any()):
        largest, kind = float(tensor.abs().max()), str(dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{name} has values up to {largest:.6g}, and {kind} ends at {torch.finfo(dtype).max:.6g}. Convert with "
            f"--dtype {'bf16' if dtype == torch.float16 else 'fp32'}."
        )
    return converted


class NotFinite:
    """The tensors among those shown that hold NaN or infinity: they are converted as they are, and named."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def show(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The same tensor."""
        if not bool(torch.stack(tensor.aminmax()).isfinite().all()):
            self._names[name] = None
        return tensor

    def warn(self) -> None:
        """One line, if there are any."""
        if self._names:
            first, *others = self._names
            more = f", and so have {len(others)} more tensors" if others else ""
            warn(f"{first} has values that are NaN or infinite{more}; they are converted as they are")


def require_room(target: Location, num_bytes: int, what: str) -> None:
    """Refuse what does not fit, where the store says what does."""
    path = target.local
    if path is not None:
        target.carry_out("ask for the space of", lambda: require_free_bytes(path, num_bytes, what, CheckpointError))


def carry(source: Location, target: Location, names: Collection[str]) -> tuple[str, ...]:
    """Copy those of these files that are there; their names."""
    try:
        there = {entry.name for entry in source.entries() if not entry.is_folder}
    except FileNotFoundError:
        return ()
    found = tuple(name for name in names if name in there)
    for name in found:
        copy_file(source / name, target / name)
    return found


@contextmanager
def renamed_when_done(target: Location) -> Iterator[Location]:
    """A folder to write into, which gets its name when the block ends well and is removed when it does not."""
    temporary = target.parent / f".{target.name}.tmp-{uuid.uuid4().hex}"
    temporary.make_folder()
    try:
        yield temporary
        temporary.flush()
        temporary.rename(target)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error
    finally:
        with suppress(StoreError):
            temporary.remove()
    target.parent.flush()


def read_json(path: Location) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text().removeprefix(BYTE_ORDER_MARK))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} holds a {type(tree).__name__}, not a JSON object")
    return tree

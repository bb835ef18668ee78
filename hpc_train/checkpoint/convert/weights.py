"""A checkpoint of weights alone, as conversions write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpc_train.checkpoint.convert.hf_folder import renamed_when_done, require_room
from hpc_train.checkpoint.folders.find import MODEL_FILE, write_model_file
from hpc_train.checkpoint.format.model_tensors import ModelSpec
from hpc_train.checkpoint.format.state import DeferredPiece
from hpc_train.checkpoint.progress import Advance
from hpc_train.checkpoint.saving.save import write_alone
from hpc_train.checkpoint.stores.location import Location


def write_weights(
    target: Location,
    pieces: Sequence[DeferredPiece],
    spec: ModelSpec,
    origin: str,
    progress: Advance,
    add: Callable[[Location], tuple[str, ...]] = lambda folder: (),
) -> tuple[str, ...]:
    """Write a checkpoint of step 0 that has its name when it is whole, and get what `add` says.

    add: puts more files into the folder, before it gets its name.

    Raises:
        CheckpointError: there is no room, or it could not be written; nothing of it is left.
    """
    require_room(target, sum(piece.box.num_elements * piece.dtype.itemsize for piece in pieces), "the checkpoint")
    with renamed_when_done(target) as temporary:
        write_alone(temporary, 0, pieces, {"origin": origin}, progress)
        write_model_file(temporary / MODEL_FILE, spec, origin)
        return add(temporary)

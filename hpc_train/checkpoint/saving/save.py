"""Write a checkpoint by the ranks themselves: torch's distributed-checkpoint files, our manifest, one atomic commit.

1. rank 0 makes a temporary folder, unless another start of the run has begun
2. every rank writes its pieces into a file of its own and notes where the raw bytes lie
3. rank 0 gathers these notes (as JSON), writes torch's `.metadata` and, last, the manifest
4. rank 0 looks for another start once more, renames the folder, points `latest` to it and removes old ones

After each phase all ranks agree that it went well; otherwise rank 0 removes the folder and all raise alike.
Where node agents write, see `saver`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hpc_train.checkpoint.files.finish import finish
from hpc_train.checkpoint.files.write import in_words
from hpc_train.checkpoint.folders import folder as folders
from hpc_train.checkpoint.folders.attempt import ATTEMPT_VALUE, require_attempt
from hpc_train.checkpoint.format.placed import WrittenBox
from hpc_train.checkpoint.format.state import Piece, StatePiece
from hpc_train.checkpoint.format.torch_index import index_bytes
from hpc_train.checkpoint.progress import UNHEARD, Advance
from hpc_train.checkpoint.saving import torch_files
from hpc_train.checkpoint.stores.location import Location, Place, locate
from hpc_train.checkpoint.stores.visible import wait_for_folder
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError, HangError, HpcTrainError
from hpc_train.log import warn


def save_checkpoint(
    place: Place, step: int, pieces: Sequence[StatePiece], values: dict[str, Any], world: World, *, keep: int
) -> Location:
    """Save all ranks' pieces as step_N below `place` and return where. Collective over all ranks.

    Together the pieces must cover each tensor exactly once. keep: newest checkpoints to keep, 0 for all. values: on
    rank 0 they name the start of the run that saves (`ATTEMPT_VALUE`); without that nobody is kept off.

    Raises:
        CheckpointError: on every rank, if any rank could not write, or another start of the run has begun; older
            checkpoints are untouched.
        HangError: one of these, where calls of the store are bound (see `Location.within`) and one does not get on.
            What was written is left, for the next save to remove.
    """
    root, is_writer = locate(place), world.rank == 0
    attempt = values.get(ATTEMPT_VALUE)

    def check() -> None:
        if attempt is not None:
            require_attempt(root, attempt)

    def begin() -> Location | None:
        if not is_writer:
            return None
        check()
        return folders.create_temporary(root, step)

    temporary = _agreed_below(world, root, begin)
    try:
        written = _agreed(world, root, lambda: _write_pieces(temporary, pieces, world.rank))
        gathered = world.control.gather([box.to_plain() for box in written])
        every = [WrittenBox.from_plain(box) for of_rank in gathered or () for box in of_rank]
        _agreed(world, root, lambda: _finish(temporary, step, every, values) if is_writer else None)
    except HpcTrainError as error:
        if is_writer and not isinstance(error, HangError):
            with suppress(HpcTrainError):
                temporary.remove()
        raise
    final = _agreed_below(
        world, root, lambda: folders.commit(temporary, root, step, check=check) if is_writer else None
    )
    _agreed(world, root, lambda: folders.prune(root, step, keep, check=check) if is_writer else None)
    return final


def write_alone(
    folder: Place, step: int, pieces: Sequence[Piece], values: dict[str, Any], progress: Advance = UNHEARD
) -> None:
    """Write a whole checkpoint from this process into an empty folder, one piece in memory at a time.

    Raises:
        CheckpointError: it could not be written, or the pieces do not cover each tensor exactly once.
    """
    where = locate(folder)
    try:
        _finish(where, step, _write_pieces(where, pieces, rank=0, progress=progress), values)
    except HpcTrainError:
        raise
    except Exception as problem:
        raise CheckpointError(f"the checkpoint could not be written: {in_words(problem, where)}") from problem


def _agreed(world: World, root: Location, phase: Callable[[], Any]) -> Any:
    """Run a phase that may fail on some ranks; return its value, or raise a CheckpointError on all."""
    value, error = None, None
    try:
        value = phase()
    except CheckpointError as problem:
        error = problem
    except Exception as problem:
        error = CheckpointError(f"the checkpoint could not be written: {in_words(problem, root)}")
        error.__cause__ = problem
    world.agree(error)
    return value


def _agreed_below(world: World, root: Location, phase: Callable[[], Location | None]) -> Location:
    """Like _agreed, for a folder below root that rank 0 knows and tells the others."""
    path = _agreed(world, root, phase)
    return root / world.control.broadcast(path.name if path is not None else None)


def _write_pieces(
    temporary: Location, pieces: Sequence[Piece], rank: int, progress: Advance = UNHEARD
) -> list[WrittenBox]:
    wait_for_folder(temporary)
    return torch_files.write_pieces(temporary, pieces, rank, progress)


def _finish(temporary: Location, step: int, written: Sequence[WrittenBox], values: dict[str, Any]) -> None:
    """On rank 0."""
    index = index_bytes([box.placed for box in written])
    finish(temporary, step, written, values, memoryview(index), warn)

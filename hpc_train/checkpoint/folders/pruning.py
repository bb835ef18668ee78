"""Which checkpoints of a run may go: never the newest one that is proven good, never a damaged one. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.checkpoint.folders.damage import damage_found
from hpc_train.checkpoint.folders.folder import (
    read_committed,
    remove_checkpoint,
    set_aside_command,
    steps_newest_first,
)
from hpc_train.checkpoint.folders.verify import verify
from hpc_train.checkpoint.progress import UNHEARD, Advance
from hpc_train.checkpoint.stores.cause import StoreError, is_unread
from hpc_train.checkpoint.stores.location import Location
from hpc_train.errors import CheckpointError


@dataclass(frozen=True)
class Pruning:
    """What is kept, what goes, and what is left because it cannot be used and might be mended, with the reason.

    All newest first.
    """

    kept: tuple[Location, ...]
    removed: tuple[Location, ...]
    damaged: tuple[tuple[Location, str], ...]


def plan_pruning(root: Location, keep: int, every: int | None = None, progress: Advance = UNHEARD) -> Pruning:
    """Keep the newest `keep` sound checkpoints, and those whose step is a multiple of `every`.

    The newest ones are read byte by byte until one has all its checksums; older ones are known by their files' sizes.

    Raises:
        ValueError: keep < 1.
        StoreError: one of them cannot be read, so that nobody knows what of the others may go.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint is kept")
    kept: list[Location] = []
    removed: list[Location] = []
    damaged: list[tuple[Location, str]] = []
    for step, path in steps_newest_first(root):
        problem = _problem(path, progress if not kept else None)
        if problem is not None:
            damaged.append((path, problem))
        elif len(kept) < keep or (every is not None and step % every == 0):
            kept.append(path)
        else:
            removed.append(path)
    return Pruning(tuple(kept), tuple(removed), tuple(damaged))


def carry_out(pruning: Pruning) -> None:
    """Remove what goes, oldest first, so that an end in the middle leaves the newest ones."""
    for path in reversed(pruning.removed):
        remove_checkpoint(path)


def _problem(path: Location, progress: Advance | None) -> str | None:
    """progress: of reading every byte; None: they are not read."""
    try:
        read_committed(path)
        if (told := damage_found(path)) is not None:
            return told
        return next(verify(path, progress), None) if progress is not None else None
    except CheckpointError as error:
        if is_unread(error):
            cause = error.cause if isinstance(error, StoreError) else None
            raise StoreError(
                f"nothing is removed, since {path} cannot be read and may be whole (to thin out the others: "
                f"{set_aside_command(path)}): {error}",
                cause,
            ) from error
        return str(error)

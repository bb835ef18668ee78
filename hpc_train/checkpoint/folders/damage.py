"""What a start has found wrong with the bytes of a checkpoint, which its files' sizes do not tell. Needs no torch.

It is noted for who removes older checkpoints, and for these bytes alone: what is wrong with a manifest or with files'
sizes everybody finds who looks. The next start tries it all the same: what was damaged may have been the memory of the
node that read it.
"""

from __future__ import annotations

from hpc_train.checkpoint.stores.cause import StoreError
from hpc_train.checkpoint.stores.location import Location
from hpc_train.log import warn

DAMAGED_FILE = "damaged"
"""In the folder of a checkpoint, until a start finds it good."""


def mark_damaged(path: Location, why: str | None) -> None:
    """Note that a start has found a checkpoint damaged, or good (None). What fails is told.

    What is damaged is neither counted nor removed where older checkpoints are.
    """
    mark = path / DAMAGED_FILE
    try:
        is_marked = mark.is_file()
        if why is not None and not is_marked:
            mark.write_text(why + "\n")
        elif why is None and is_marked:
            mark.remove()
    except (StoreError, OSError) as problem:
        warn(f"{mark} could not be {'removed' if why is None else 'written'}, by which checkpoint.keep goes: {problem}")


def damage_found(path: Location) -> str | None:
    """In words what a start has found wrong with the bytes of a checkpoint; None where it found nothing."""
    try:
        told = (path / DAMAGED_FILE).read_text().strip()
    except FileNotFoundError:
        return None
    return f"a start has found {path} damaged: {told}. It counts again without its file `{DAMAGED_FILE}`"

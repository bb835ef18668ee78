"""Which copies on nodes' own disks belong to what the store holds: a note beside the checkpoints. Needs no torch.

Steps do not tell that: whoever removes checkpoints, or the whole folder, goes back, and nodes that were not in the job
since keep copies of what came after. So each start notes, when it knows where it goes on from and before its first
step, that from now on only its own copies count, and those that it went on from, where it did.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass

from hpc_train.checkpoint.stores.location import Location

COPIES_FILE = "copies.json"
"""In a folder of checkpoints; without it no copy counts."""


@dataclass(frozen=True)
class Lineage:
    """Which copies count.

    attempt: those of this start of the run (see `attempt`). tokens: of the save on the disks that it went on from, if
    any, and of older ones that were whole there then.
    """

    attempt: str | None = None
    tokens: tuple[str, ...] = ()

    def has(self, attempt: str, token: str) -> bool:
        """Whether a copy of a save, made by a start of the run, counts."""
        return attempt == self.attempt or token in self.tokens


def read_lineage(root: Location) -> Lineage:
    """What is noted beside the checkpoints; a lineage without copies where there is nothing that can be read.

    Raises:
        CheckpointError: the store does not answer.
    """
    try:
        tree = json.loads((root / COPIES_FILE).read_text())
        return Lineage(str(tree["attempt"]), tuple(map(str, tree["tokens"])))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return Lineage()


def note_lineage(root: Location, lineage: Lineage) -> None:
    """Have only these copies count from now on.

    Raises:
        CheckpointError: the store does not take it.
    """
    temporary = root / f".copies.tmp-{uuid.uuid4().hex}"
    temporary.write_text(json.dumps(asdict(lineage)) + "\n")
    temporary.replace(root / COPIES_FILE)


def forget_lineage(root: Location) -> None:
    """Have no copies count from now on: this start makes none.

    Raises:
        CheckpointError: the store does not let go of the note.
    """
    (root / COPIES_FILE).remove()

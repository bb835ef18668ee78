"""One save as a node agent carries it out: from the ranks' shared memory to the store. Needs no torch.

1. the files of the node's ranks, several at a time, each from beginning to end
2. a record of what was written, or of why it was not, for the node of rank 0
3. on the node of rank 0, when all nodes' records are there: torch's index, the manifest, the commit
4. there, when the ranks may know of it: the removal of older checkpoints, which takes a fifth of the time of a save
   (measured: 0.3 s of 1.9 s for 1 GiB)
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.files.finish import finish
from hpc_train.checkpoint.files.parts import Part, write_parts
from hpc_train.checkpoint.files.write import Flow, in_words, write_new_file
from hpc_train.checkpoint.folders import folder as folders
from hpc_train.checkpoint.folders.attempt import require_agents
from hpc_train.checkpoint.format.placed import WrittenBox
from hpc_train.checkpoint.stores.backend import Buffer
from hpc_train.checkpoint.stores.cause import StoreError
from hpc_train.checkpoint.stores.location import Location
from hpc_train.checkpoint.stores.visible import wait_for_file
from hpc_train.errors import CheckpointError, HpcTrainError
from hpc_train.plan.run_files import CheckpointsNote, write_checkpoints_note

Log = Callable[[str], None]

_RECORDS = "nodes"
"""In the folder of a step that is being written; gone before it is committed."""
_RECORD = re.compile(r"node-(\d+)\.json")
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.02, 1.0


@dataclass(frozen=True)
class Target:
    """Where a run's checkpoints go, and how.

    keep: as checkpoint.keep. bytes_per_s: the most that this node writes, or None. note_dir: the run folder that is
    told of the newest step, where checkpoints lie elsewhere. attempt: which start of the run this is.
    """

    root: Location
    keep: int
    bytes_per_s: float | None
    note_dir: Path | None
    attempt: str
    node_rank: int
    num_nodes: int


def look_for_trial(target: Target, name: str, is_wanted: Callable[[], bool]) -> None:
    """See that this node's agent has the ranks' view of the store: that it finds a file which rank 0 has put there.

    is_wanted: says no when the ranks have gone, and taken the file along.

    Raises:
        CheckpointError: it does not.
    """
    wait_for_file(target.root / name, is_wanted=is_wanted)


def write_node(target: Target, step: int, token: str, parts: Sequence[Part], flow: Flow, log: Log) -> list[WrittenBox]:
    """Phases 1 and 2, of a node that is not that of rank 0.

    Raises:
        Exception: it failed; the record says so, if it can be written.
    """
    folder = folders.temporary_folder(target.root, step, token)
    # Not waited for: the node of rank 0 may take long to remove what earlier attempts left.
    folder.make_folder()
    written = write_parts(folder, parts, flow, log)
    _write_record(folder, target.node_rank, {"written": [box.to_plain() for box in written]}, log)
    return written


def write_failure(target: Target, step: int, token: str, why: str, log: Log) -> None:
    """Tell the node of rank 0 that this one's part does not come."""
    folder = folders.temporary_folder(target.root, step, token)
    with suppress(HpcTrainError, OSError):
        _write_record(folder, target.node_rank, {"error": why}, log)


def write_first_node(
    target: Target, step: int, token: str, parts: Sequence[Part], flow: Flow, log: Log
) -> list[WrittenBox]:
    """Phase 1 on the node of rank 0, which also removes what earlier attempts left."""
    require_agents(target.root, target.attempt)
    folder = folders.create_temporary(target.root, step, token, log)
    if target.num_nodes > 1:
        # Made before it is looked for: network file systems remember for long that something was not there.
        (folder / _RECORDS).make_folder()
    return write_parts(folder, parts, flow, log)


def commit(
    target: Target,
    step: int,
    token: str,
    own: Sequence[WrittenBox],
    values: dict[str, Any],
    index: Buffer,
    flow: Flow,
    log: Log,
    tell: Log,
) -> None:
    """Phase 3: wait for the other nodes' records, and make the folder a checkpoint.

    tell: gets what the run's own log should say as well.

    Raises:
        CheckpointError: another node's part does not come, the store fails, or another start of the run has begun.
            What goes wrong when the checkpoint is there is told alone.
    """
    folder = folders.temporary_folder(target.root, step, token)
    written = [*own]
    if target.num_nodes > 1:
        for of_node in _records(folder, set(range(target.num_nodes)) - {target.node_rank}, flow):
            written += of_node
        (folder / _RECORDS).remove()
    finish(folder, step, written, values, index, log)

    def check() -> None:
        require_agents(target.root, target.attempt)
        flow.check()

    folders.commit(folder, target.root, step, tell, check)
    if target.note_dir is not None:
        try:
            write_checkpoints_note(target.note_dir, CheckpointsNote(str(target.root), step))
        except OSError as problem:
            tell(f"checkpoint: the run folder could not be told of step {step}: {problem}")


def thin_out(target: Target, saved: int, log: Log, is_enough: Callable[[], bool]) -> None:
    """Remove the checkpoints that are not kept any more, until another start of the run has begun; raises nothing.

    saved, is_enough: see `prune`.
    """

    def check() -> None:
        require_agents(target.root, target.attempt)

    try:
        folders.prune(target.root, saved, target.keep, log, check, is_enough)
    except BaseException as problem:  # clients in Rust that panic raise what is no Exception
        log(f"checkpoint: old ones are left: {describe(problem, target)}")


def give_up(target: Target, step: int, token: str) -> None:
    """Remove what was written of a save that failed."""
    with suppress(HpcTrainError):
        folders.temporary_folder(target.root, step, token).remove()


def describe(problem: BaseException, target: Target) -> str:
    return str(problem) if isinstance(problem, HpcTrainError) else in_words(problem, target.root)


def _write_record(folder: Location, node_rank: int, tree: dict[str, Any], log: Log) -> None:
    records = folder / _RECORDS
    records.make_folder()
    # A name of its own: where the record of the files fails half-way, that of the failure must still come.
    unfinished = records / f"node-{node_rank}.json.part-{secrets.token_hex(4)}"
    content = memoryview(json.dumps(tree).encode())

    def write(place: Location) -> None:
        with place.writing() as file:
            file.write(content)

    write_new_file(unfinished, write, log)
    unfinished.rename(records / f"node-{node_rank}.json")


def _records(folder: Location, missing: set[int], flow: Flow) -> Iterator[list[WrittenBox]]:
    """What the other nodes have written, as their records come."""
    pause_s = _FIRST_LOOK_S
    while missing:
        flow.check()
        for node_rank, name in _record_names(folder):
            if node_rank in missing:
                yield _read_record(folder / _RECORDS / name, node_rank)
                missing.discard(node_rank)
                pause_s = _FIRST_LOOK_S
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)


def _record_names(folder: Location) -> list[tuple[int, str]]:
    try:
        names = [entry.name for entry in (folder / _RECORDS).entries()]
    except FileNotFoundError:
        return []
    return [(int(match[1]), name) for name in names if (match := _RECORD.fullmatch(name))]


def _read_record(path: Location, node_rank: int) -> list[WrittenBox]:
    try:
        tree = json.loads(path.read_text())
    except (ValueError, FileNotFoundError) as problem:
        raise StoreError(f"{path} cannot be read: {problem}") from problem
    if "error" in tree:
        raise CheckpointError(f"node {node_rank}: {tree['error']}")
    return [WrittenBox.from_plain(box) for box in tree["written"]]

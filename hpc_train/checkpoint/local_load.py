"""Go on from the parts of a save on the nodes' own disks, where all of them are at hand (see `local_parts`).

1. each node says which sound parts it has; rank 0 decides which saves are whole, and where each part is read
2. rank 0 makes a manifest of the records of the newest whole one, and tells it
3. the pieces are filled as from a store, but every byte is read by a rank of the node where it lies

Copies are used only where they are as new as the store's checkpoint, and where that still has what it had then: who
removes checkpoints to go back is not led past them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.fill import fill
from hpc_train.checkpoint.finish import tensors_of
from hpc_train.checkpoint.local_parts import PartRecord, sound_parts
from hpc_train.checkpoint.location import locate
from hpc_train.checkpoint.manifest import Manifest, parse_manifest
from hpc_train.checkpoint.needs import plan_loading
from hpc_train.checkpoint.state import StatePiece
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError
from hpc_train.log import say, warn
from hpc_train.plan.local_sets import FoundPart, WholeSet, choose_sets


@dataclass(frozen=True)
class LocalLoaded:
    """What was loaded, and the word of its save."""

    step: int
    token: str
    values: dict[str, Any]


@dataclass(frozen=True)
class StoreSteps:
    """What lies in the store: the newest sound step, and the newest of any kind; None where there is none."""

    sound: int | None
    newest: int | None


def load_local(
    folder: Path, pieces: Sequence[StatePiece], world: World, store: StoreSteps
) -> tuple[LocalLoaded | None, bool]:
    """Fill the pieces from the newest whole save on the nodes' own disks that the store has nothing newer than.

    Collective over all ranks. folder: this node's. store: as rank 0 knows it.

    Returns:
        What was loaded, or None; and whether a try has left something in the pieces.
    """
    records, faults = sound_parts(folder) if world.local_rank == 0 else ([], [])
    for fault in faults:
        warn(f"a part on this node's own disk is left out: {fault}")
    is_touched = False
    for chosen in _chosen_sets(records, world, store):
        save = (chosen.token, len(chosen.at))
        of_save = [record for record in records if (record.name.token, record.name.num_nodes) == save]
        mine = [record for record in of_save if chosen.at[record.name.node] == world.node_rank]
        problem, merged = _merged(mine, chosen, store, world)
        if merged is not None:
            manifest = parse_manifest(merged.manifest, locate(folder))
            problem, is_touched = _fill(folder, manifest, merged, pieces, world), True
            if problem is None:
                _say_whole(chosen, world)
                return LocalLoaded(chosen.step, chosen.token, manifest.values), True
        if world.rank == 0:
            warn(f"step {chosen.step} on the nodes' own disks is left out: {problem}")
    return None, is_touched


def _chosen_sets(records: Sequence[PartRecord], world: World, store: StoreSteps) -> Iterator[WholeSet]:
    """The whole sets, the newest first, as rank 0 chooses them. Collective over all ranks."""
    names = [record.name for record in records]
    plain = [[name.step, name.token, name.node, name.num_nodes, world.node_rank] for name in names]
    gathered = world.control.gather(plain)
    told = None
    if gathered is not None:
        found = [FoundPart(*row) for of_rank in gathered for row in of_rank]
        whole, broken = choose_sets(found, 0 if store.sound is None else store.sound)
        for entry in broken:
            if not whole or entry.step > whole[0].step:
                warn(
                    f"step {entry.step} is not whole on the nodes' own disks: {len(entry.missing)} of "
                    f"{entry.num_nodes} nodes' parts, node {entry.missing[0]}'s first, are on no node of this job"
                )
        told = [[entry.step, entry.token, entry.at] for entry in whole]
    for step, token, at in world.control.broadcast(told):
        yield WholeSet(step, token, tuple(at))


@dataclass(frozen=True)
class _Merged:
    """A save as a checkpoint. at_of_file, folder_of_file: the node that reads each file, and the name of its part."""

    manifest: str
    at_of_file: dict[str, int]
    folder_of_file: dict[str, str]


def _merged(
    records: Sequence[PartRecord], chosen: WholeSet, store: StoreSteps, world: World
) -> tuple[str | None, _Merged | None]:
    """The save that these and the other ranks' records make, or why it is none; as rank 0 says. Collective."""
    gathered = world.control.gather([record.to_json() for record in records])
    told: list[Any] = [None, None]
    if gathered is not None:
        try:
            every = sorted(
                (PartRecord.parse(text, "a part's record") for of_rank in gathered for text in of_rank),
                key=lambda record: record.name,
            )
            first = _of_rank_0(every, store)
            tensors = tensors_of([box for record in every for box in record.written])
            files = {file: size for record in every for file, size in record.files.items()}
            manifest = Manifest(chosen.step, first.values or {}, tensors, files).to_json()
            at = {file: chosen.at[record.name.node] for record in every for file in record.files}
            told = [None, [manifest, at, {file: record.name.folder for record in every for file in record.files}]]
        except CheckpointError as fault:
            told = [str(fault), None]
    problem, merged = world.control.broadcast(told)
    return problem, None if merged is None else _Merged(*merged)


def _of_rank_0(records: Sequence[PartRecord], store: StoreSteps) -> PartRecord:
    """The part of rank 0's node.

    Raises:
        CheckpointError: the save must not be gone on from: the store has lost what the run had there.
    """
    first = next((record for record in records if record.values is not None), None)
    if first is None:
        raise CheckpointError("no part has the position of the data, which is with the node of rank 0")
    had = first.store_step
    if had is not None and (store.newest is None or store.newest < had):
        has = "none" if store.newest is None else f"step {store.newest} as the newest one"
        raise CheckpointError(f"step {had} was in the store when it was copied, which has {has} now")
    return first


def _say_whole(chosen: WholeSet, world: World) -> None:
    if world.rank == 0:
        moved = sum(node != at for node, at in enumerate(chosen.at))
        elsewhere = f", {moved} of them on other nodes than before" if moved else ""
        parts = "1 part" if len(chosen.at) == 1 else f"{len(chosen.at)} parts"
        say(f"step {chosen.step} is whole on the nodes' own disks: {parts}{elsewhere}")


def _fill(folder: Path, manifest: Manifest, merged: _Merged, pieces: Sequence[StatePiece], world: World) -> str | None:
    """Fill the pieces; what is wrong, the same on every rank. Collective over all ranks."""
    here = locate(folder)
    spread = {file: (at, here / merged.folder_of_file[file]) for file, at in merged.at_of_file.items()}
    try:
        return fill(plan_loading(here, manifest, pieces, world, exact=True, spread=spread), world)
    except CheckpointError as problem:  # raised alike on every rank
        return str(problem)

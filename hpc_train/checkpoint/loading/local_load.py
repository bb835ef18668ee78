"""Go on from the parts of a save on the nodes' own disks, where all of them are at hand (see `local_parts`).

1. each node claims its folder and says which sound parts it has; rank 0 decides which save is whole, and where each
   part is read
2. rank 0 makes a manifest of the records of the newest whole one, and tells it
3. the pieces are filled as from a store, but every byte is read by a rank of the node where it lies
4. where bytes are damaged, the parts they are in are found and left out, and it is decided again: the other copy of a
   part is read, or an older save

Copies are used only where they belong to what the store holds (`lineage`), are as new as its checkpoint, and where that
still has what it had then: who removes checkpoints to go back is not led past them. Without a checkpoint in the store
all bytes are checked before any is taken, so that a run which finds nothing begins as it would without copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc_train.checkpoint.copies.lineage import Lineage
from hpc_train.checkpoint.copies.local_check import damaged_parts
from hpc_train.checkpoint.copies.local_folder import NodeFolder
from hpc_train.checkpoint.copies.local_parts import PartName, PartRecord, sound_parts
from hpc_train.checkpoint.copies.local_saves import LocalFolder
from hpc_train.checkpoint.files.finish import tensors_of
from hpc_train.checkpoint.format.manifest import Manifest, parse_manifest
from hpc_train.checkpoint.format.state import StatePiece
from hpc_train.checkpoint.loading.fill import fill
from hpc_train.checkpoint.loading.needs import plan_loading
from hpc_train.checkpoint.stores.bounded import bounded
from hpc_train.checkpoint.stores.caller import Bound
from hpc_train.checkpoint.stores.location import Location, locate
from hpc_train.cluster.agent_wait import AgentLimits
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError
from hpc_train.log import say, warn
from hpc_train.plan.local_sets import FoundPart, WholeSet, choose_sets

_LOOK_S = 60.0
"""For a node's disk to show its parts, of which there are a few small records to read; assumed: a node that swaps."""


@dataclass(frozen=True)
class LocalLoaded:
    """What was loaded. tokens, twice: as of `load.Loaded.local_tokens` and `local_twice`."""

    step: int
    tokens: tuple[str, ...]
    twice: str | None
    values: dict[str, Any]


@dataclass(frozen=True)
class StoreSteps:
    """What lies in the store: the newest sound step, and on rank 0 the newest of any kind, None where there is none.

    lineage: on rank 0, which copies belong to it.
    """

    sound: int | None
    newest: int | None
    lineage: Lineage


def load_local(
    local: LocalFolder, pieces: Sequence[StatePiece], world: World, store: StoreSteps, limits: AgentLimits
) -> tuple[LocalLoaded | None, bool]:
    """Fill the pieces from the newest whole save on the nodes' own disks that the store has nothing newer than.

    Collective over all ranks. local: this node's. store: as rank 0 knows it. limits: as of `fill`.

    Returns:
        What was loaded, or None; and whether a try has left something in the pieces.
    """
    root = locate(local.path)
    records, faults = _claimed_parts(local, world) if world.local_rank == 0 else ([], [])
    for fault in faults:
        warn(f"a part on this node's own disk is left out: {fault}")
    choice = _Choice(records, world, store)
    checked: set[str] = set()
    is_touched, checks_first = False, store.sound is None
    while whole := choice.next():
        chosen = whole[0]
        if checks_first and chosen.token not in checked:
            names = [name for name in _names(chosen) if chosen.at[name.node] == world.node_rank]
            bound = Bound(limits.data_s, "Look at that disk", tell=warn if world.local_rank == 0 else None)
            damaged = damaged_parts(root.within(bound), names, world)
            choice.leave_out(damaged)
            if damaged:
                continue
            checked.add(chosen.token)
        problem, merged = _merged(records, chosen, store, world)
        if merged is not None:
            manifest = parse_manifest(merged.manifest, root)
            problem, touches = _fill(root, manifest, merged, pieces, world, limits)
            is_touched = is_touched or touches
            if problem is None:
                _say_whole(chosen, world)
                tokens = tuple(entry.token for entry in reversed(whole))
                twice = next((entry.token for entry in whole if entry.num_copies > 1), None)
                return LocalLoaded(chosen.step, tokens, twice, manifest.values), True
            if not checks_first:
                checks_first = True  # which part it is in, is found now
                continue
        if world.rank == 0:
            warn(f"step {chosen.step} on the nodes' own disks is left out: {problem}")
        choice.leave_out_save(chosen)
    return None, is_touched


def _claimed_parts(local: LocalFolder, world: World) -> tuple[list[PartRecord], list[str]]:
    """What this node has, which nobody of an earlier start changes any more, and what is wrong with the rest."""

    def look() -> tuple[list[PartRecord], list[str]]:
        NodeFolder(local.path, local.attempt, world.node_rank)
        return sound_parts(local.path)

    try:
        what = f"looking for the parts on {world.node}'s own disk"
        return bounded(locate(local.path), look, what, Bound(_LOOK_S, "Look at that disk"))
    except Exception as problem:
        return [], [str(problem)]


def _names(chosen: WholeSet) -> list[PartName]:
    return [PartName(chosen.step, chosen.token, node, len(chosen.at)) for node in range(len(chosen.at))]


class _Choice:
    """Which save is tried next, as rank 0 decides it. Methods are collective unless they say otherwise."""

    def __init__(self, records: Sequence[PartRecord], world: World, store: StoreSteps) -> None:
        self._world = world
        self._at_least = 0 if store.sound is None else store.sound
        self._found: list[FoundPart] = []
        self._told: set[str] = set()
        names = [(record.name, record.attempt) for record in records]
        gathered = world.control.gather(
            [[name.step, name.token, name.node, name.num_nodes, world.node_rank, attempt] for name, attempt in names]
        )
        if gathered is not None:
            rows = [row for of_rank in gathered for row in of_rank]
            self._found = [FoundPart(*row[:5]) for row in rows if store.lineage.has(row[5], row[1])]
            strange = {row[0] for row in rows if row[0] > self._at_least and not store.lineage.has(row[5], row[1])}
            if strange:
                warn(
                    f"step {max(strange)} on the nodes' own disks is left out: it is not of what this run has gone on "
                    "from since"
                )

    def next(self) -> list[WholeSet]:
        """The one to try now, and those behind it, the newest first; none when all were tried."""
        told: list[list[Any]] = []
        if self._world.rank == 0:
            whole, broken = choose_sets(self._found, self._at_least)
            for entry in broken:
                if entry.token not in self._told and (not whole or entry.step > whole[0].step):
                    self._told.add(entry.token)
                    warn(
                        f"step {entry.step} is not whole on the nodes' own disks: {len(entry.missing)} of "
                        f"{entry.num_nodes} nodes' parts, node {entry.missing[0]}'s first, are sound on no node of "
                        "this job"
                    )
            told = [[entry.step, entry.token, entry.at, entry.num_copies] for entry in whole]
        told = self._world.control.broadcast(told)
        return [WholeSet(step, token, tuple(at), num_copies) for step, token, at, num_copies in told]

    def leave_out(self, damaged: dict[tuple[PartName, int], str]) -> None:
        """Not collective, and of effect on rank 0. damaged: what is wrong with parts, and the nodes that have them."""
        if self._world.rank == 0:
            for fault in damaged.values():
                warn(f"a part on the nodes' own disks is left out: {fault}")
            self._found = [
                part
                for part in self._found
                if (PartName(part.step, part.token, part.node, part.num_nodes), part.at) not in damaged
            ]

    def leave_out_save(self, chosen: WholeSet) -> None:
        """Not collective, and of effect on rank 0."""
        self._found = [part for part in self._found if part.token != chosen.token]


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
    names = set(_names(chosen))
    mine = [record for record in records if record.name in names and chosen.at[record.name.node] == world.node_rank]
    gathered = world.control.gather([record.to_json() for record in mine])
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


def _fill(
    root: Location,
    manifest: Manifest,
    merged: _Merged,
    pieces: Sequence[StatePiece],
    world: World,
    limits: AgentLimits,
) -> tuple[str | None, bool]:
    """Fill the pieces; what is wrong, and whether they were touched. Collective, and the same on every rank."""
    spread = {file: (at, root / merged.folder_of_file[file]) for file, at in merged.at_of_file.items()}
    try:
        loading = plan_loading(root, manifest, pieces, world, exact=True, spread=spread)
    except CheckpointError as problem:  # raised alike on every rank
        return str(problem), False
    try:
        return fill(loading, world, limits), True
    except CheckpointError as problem:
        return str(problem), True

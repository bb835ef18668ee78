"""Read a checkpoint back: our manifest, raw bytes, nothing unpickled, and all ranks take the same one.

Rank 0 alone decides what is there. All ranks plan who reads which bytes (`plan.checkpoint_load`) and fill their pieces
together (`fill`). If any rank finds damage, all ranks together fall back to the next older checkpoint. A save that is
whole on the nodes' own disks comes before the store's where it is as new (`local_load`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from hpc_train.checkpoint.copies.lineage import Lineage, read_lineage
from hpc_train.checkpoint.copies.local_saves import LocalFolder
from hpc_train.checkpoint.folders.damage import mark_damaged
from hpc_train.checkpoint.folders.folder import (
    newest_step,
    sound_checkpoints,
    steps_newest_first,
    unread_refusal,
)
from hpc_train.checkpoint.format.manifest import Manifest, parse_manifest
from hpc_train.checkpoint.format.state import StatePiece
from hpc_train.checkpoint.loading.fill import fill
from hpc_train.checkpoint.loading.local_load import StoreSteps, load_local
from hpc_train.checkpoint.loading.needs import plan_loading
from hpc_train.checkpoint.stores.bounded import bounded
from hpc_train.checkpoint.stores.caller import Bound
from hpc_train.checkpoint.stores.location import Location, Place, locate
from hpc_train.cluster.agent_wait import USUAL_LIMITS, AgentLimits
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError, HpcTrainError
from hpc_train.log import warn

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """What was loaded: the folder, its step, and the plain values saved with it.

    local_tokens: where it was read from the nodes' own disks, the words of the saves that were whole there, its own and
    older ones, oldest first. local_twice: of the newest of them that two nodes have each part of. store_step: the
    newest checkpoint that is sound in the store, on rank 0; None where there is none.
    """

    path: Location
    step: int
    values: dict[str, Any]
    store_step: int | None
    local_tokens: tuple[str, ...] = ()
    local_twice: str | None = None


def load_newest(
    place: Place,
    pieces: Sequence[StatePiece],
    world: World,
    local: LocalFolder | None = None,
    limits: AgentLimits = USUAL_LIMITS,
) -> Loaded | None:
    """Fill the pieces from the newest sound checkpoint below `place`; None if there is none at all. Collective.

    local: this node's folder of copies, from which a save is taken that is as new and whole over all nodes. limits:
    how long a store is waited for in which nothing moves.

    Raises:
        CheckpointError: on every rank: a checkpoint of another model, checkpoints without a sound one, or one that a
            store does not give, and that may be whole.
    """
    root = locate(place)
    sound = sound_checkpoints(root)  # begins to look when rank 0 asks
    found = _next_sound(root, sound, world, limits)
    is_touched = False
    if local is not None:
        store = _store_steps(root, None if found is None else found[1].step, world, limits)
        from_disks, is_touched = load_local(local, pieces, world, store, limits)
        if from_disks is not None:
            values, tokens, twice = from_disks.values, from_disks.tokens, from_disks.twice
            return Loaded(locate(local.path), from_disks.step, values, store.sound, tokens, twice)
    while found is not None:
        path, manifest = found
        loading = plan_loading(path, manifest, pieces, world, exact=True)
        try:
            problem = fill(loading, world, limits)
        except CheckpointError as error:  # on every rank
            raise unread_refusal(path, error) from error
        _of_rank_0(partial(mark_damaged, path, problem), root, world, limits)
        if problem is None:
            return Loaded(path, manifest.step, manifest.values, manifest.step)
        if world.rank == 0:
            warn(f"checkpoint {path} skipped: {problem}")
        found = _next_sound(root, sound, world, limits)
    names = _of_rank_0(lambda: [path.name for _, path in steps_newest_first(root)], root, world, limits) or []
    names += [f"copies in {local.path}"] if local is not None and is_touched else []
    unread = CheckpointError(
        f"{root} holds {', '.join(names)}, but none can be read; the reasons are above. Restore one of them, or "
        "start anew with checkpoint.resume=false in a new run folder."
    )
    world.agree(unread if names else None)
    return None


def _store_steps(root: Location, sound: int | None, world: World, limits: AgentLimits) -> StoreSteps:
    """What copies are compared with: on rank 0 all of it. Collective over all ranks."""
    found = _of_rank_0(lambda: (newest_step(root), read_lineage(root)), root, world, limits)
    newest, lineage = found or (None, Lineage())
    return StoreSteps(sound, newest, lineage)


def _next_sound(
    root: Location, sound: Iterator[tuple[Location, Manifest]], world: World, limits: AgentLimits
) -> tuple[Location, Manifest] | None:
    """The next older checkpoint that rank 0 takes for sound, on every rank; one rank asks the store. Collective."""
    found = _of_rank_0(lambda: next(sound, None), root, world, limits)
    told = world.control.broadcast(None if found is None else [found[0].name, found[1].to_json()])
    return None if told is None else (root / told[0], parse_manifest(told[1], root / told[0]))


def _of_rank_0(look: Callable[[], T], root: Location, world: World, limits: AgentLimits) -> T | None:
    """What rank 0 sees in the store; None on the others. Collective over all ranks."""
    seen, error = None, None
    if world.rank == 0:
        try:
            seen = bounded(root, look, f"looking for checkpoints on {world.node}", Bound(limits.save_s))
        except HpcTrainError as problem:
            error = problem
    world.agree(error)
    return seen

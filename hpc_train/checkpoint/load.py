"""Read a checkpoint back: our manifest, raw bytes, nothing unpickled, and all ranks take the same one.

Each rank reads the stored boxes that its own pieces touch and checks their checksums. If any rank finds damage, all
ranks together fall back to the next older checkpoint.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpc_train.checkpoint.boxes import BoxFiles
from hpc_train.checkpoint.folder import sound_checkpoints, steps_newest_first
from hpc_train.checkpoint.location import Location, Place, locate
from hpc_train.checkpoint.manifest import Manifest, StoredBox, StoredTensor, parse_manifest, read_manifest
from hpc_train.checkpoint.state import StatePiece
from hpc_train.checkpoint.store import is_outage
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError, HpcTrainError
from hpc_train.log import warn


@dataclass(frozen=True)
class Loaded:
    """What was loaded: the folder, its step, and the plain values saved with it."""

    path: Location
    step: int
    values: dict[str, Any]


def load_newest(place: Place, pieces: Sequence[StatePiece], world: World) -> Loaded | None:
    """Fill the pieces from the newest sound checkpoint below `place`; None if there is none at all. Collective.

    Rank 0 alone decides what is there.

    Raises:
        CheckpointError: on every rank: a checkpoint of another model, checkpoints without a sound one, or a store
            that does not answer.
    """
    root = locate(place)
    sound = sound_checkpoints(root)  # begins to look when rank 0 asks
    while (found := _next_sound(root, sound, world)) is not None:
        path, manifest = found
        _agree_on_model(path, manifest, pieces, world)
        problem, outage = None, None
        try:
            problem = _fill(path, manifest, pieces)
        except HpcTrainError as error:
            outage = error
        world.agree(outage)
        problems = [item for item in world.control.all_gather(problem) if item]
        if not problems:
            return Loaded(path, manifest.step, manifest.values)
        if world.rank == 0:
            warn(f"checkpoint {path} skipped: {problems[0]}")
    names = [path.name for _, path in steps_newest_first(root)] if world.rank == 0 else []
    unread = CheckpointError(
        f"{root} holds {', '.join(names)}, but none can be read; the reasons are above. Restore one of them, or "
        "start anew with checkpoint.resume=false in a new run folder."
    )
    world.agree(unread if names else None)
    return None


def _next_sound(
    root: Location, sound: Iterator[tuple[Location, Manifest]], world: World
) -> tuple[Location, Manifest] | None:
    """The next older checkpoint that rank 0 takes for sound, on every rank; one rank asks the store. Collective."""
    told, error = None, None
    if world.rank == 0:
        try:
            found = next(sound, None)
            told = None if found is None else [found[0].name, found[1].to_json()]
        except HpcTrainError as problem:
            error = problem
    world.agree(error)
    told = world.control.broadcast(told)
    return None if told is None else (root / told[0], parse_manifest(told[1], root / told[0]))


def load_pieces(path: Location, pieces: Sequence[StatePiece]) -> str | None:
    """Fill pieces from one checkpoint, converting types; what is wrong with it as a sentence, or None."""
    try:
        return _fill(path, read_manifest(path), pieces)
    except CheckpointError as error:
        return str(error)


def _agree_on_model(path: Location, manifest: Manifest, pieces: Sequence[StatePiece], world: World) -> None:
    error = None
    try:
        _check_same_model(path, manifest, pieces)
    except CheckpointError as problem:
        error = problem
    world.agree(error)


def _check_same_model(path: Location, manifest: Manifest, pieces: Sequence[StatePiece]) -> None:
    for piece in pieces:
        stored = manifest.tensors.get(piece.name)
        if stored is None:
            raise CheckpointError(
                f"{path} is of another model: it has no tensor {piece.name}. It has "
                f"{', '.join(list(manifest.tensors)[:3])}, ... Use the configuration that it was saved with, "
                "or another run folder."
            )
        dtype = str(piece.data.dtype).removeprefix("torch.")
        if stored.shape != piece.shape or stored.dtype != dtype:
            raise CheckpointError(
                f"{path} is of another model: {piece.name} is {stored.dtype}{list(stored.shape)} there and "
                f"{dtype}{list(piece.shape)} here. Use the configuration that it was saved with, or another run folder."
            )


def _fill(path: Location, manifest: Manifest, pieces: Sequence[StatePiece]) -> str | None:
    """Copy the stored boxes into the pieces; the first damage found as a sentence, or None.

    Raises:
        StoreError: the store does not answer.
    """
    try:
        with BoxFiles(path) as files:
            for piece in pieces:
                stored = manifest.tensors[piece.name]
                filled = sum(_copy_shared(files, path, stored, box, piece) for box in stored.boxes)
                if filled != piece.data.numel():
                    return f"{piece.name} is stored with gaps: {filled} of {piece.data.numel()} elements found"
    except CheckpointError as error:
        if is_outage(error):
            raise
        return str(error)
    return None


def _copy_shared(files: BoxFiles, path: Location, tensor: StoredTensor, stored: StoredBox, piece: StatePiece) -> int:
    """Copy what a stored box and a piece share; the number of elements copied."""
    shared = stored.box.intersection(piece.box)
    if shared is None:
        return 0
    raw = files.read(stored.file, stored.start, stored.num_bytes)
    if zlib.crc32(raw.data) != stored.crc32:
        raise CheckpointError(
            f"{path / stored.file} is damaged: the checksum of the bytes at {stored.start} does not match"
        )
    values = torch.from_numpy(raw).view(getattr(torch, tensor.dtype)).view(stored.box.sizes)
    target = piece.data.view(piece.box.sizes)
    target[shared.slices_within(piece.box)] = values[shared.slices_within(stored.box)].to(target.device)
    return shared.num_elements

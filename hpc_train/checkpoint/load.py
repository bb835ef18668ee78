"""Read a checkpoint back: our manifest, raw bytes, nothing unpickled, and all ranks take the same one.

Each rank reads the stored boxes that its own pieces touch and checks their checksums. If any rank finds damage, all
ranks together fall back to the next older checkpoint.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_train.checkpoint.folder import sound_checkpoints, steps_newest_first
from hpc_train.checkpoint.manifest import Manifest, StoredBox, StoredTensor, read_manifest
from hpc_train.checkpoint.state import StatePiece
from hpc_train.comm.world import World
from hpc_train.errors import CheckpointError
from hpc_train.log import warn


@dataclass(frozen=True)
class Loaded:
    """What was loaded: the folder, its step, and the plain values saved with it."""

    path: Path
    step: int
    values: dict[str, Any]


def load_newest(root: Path, pieces: Sequence[StatePiece], world: World) -> Loaded | None:
    """Fill the pieces from the newest sound checkpoint; None if there is no checkpoint at all. Collective.

    Raises:
        CheckpointError: on every rank: a checkpoint of another model, or checkpoints without a sound one.
    """
    candidates = [str(path) for _, path in sound_checkpoints(root)] if world.rank == 0 else None
    candidates = world.control.broadcast(candidates)
    for path in candidates:
        manifest = _agreed_manifest(Path(path), pieces, world)
        problem = _fill(Path(path), manifest, pieces)
        problems = [item for item in world.control.all_gather(problem) if item]
        if not problems:
            return Loaded(Path(path), manifest.step, manifest.values)
        if world.rank == 0:
            warn(f"checkpoint {path} skipped: {problems[0]}")
    found = [path.name for _, path in steps_newest_first(root)] if world.rank == 0 else []
    error = CheckpointError(
        f"{root} holds {', '.join(found)}, but none can be read; the reasons are above. Restore one of them, or "
        "start anew with checkpoint.resume=false in a new run folder."
    )
    world.agree(error if found else None)
    return None


def load_pieces(path: Path, pieces: Sequence[StatePiece]) -> str | None:
    """Fill pieces from one checkpoint, converting types; what is wrong with it as a sentence, or None."""
    try:
        return _fill(path, read_manifest(path), pieces)
    except CheckpointError as error:
        return str(error)


def _agreed_manifest(path: Path, pieces: Sequence[StatePiece], world: World) -> Manifest:
    manifest, error = None, None
    try:
        manifest = read_manifest(path)
        _check_same_model(path, manifest, pieces)
    except CheckpointError as problem:
        error = problem
    world.agree(error)
    assert manifest is not None
    return manifest


def _check_same_model(path: Path, manifest: Manifest, pieces: Sequence[StatePiece]) -> None:
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


def _fill(path: Path, manifest: Manifest, pieces: Sequence[StatePiece]) -> str | None:
    """Copy the stored boxes into the pieces; the first damage found as a sentence, or None."""
    try:
        for piece in pieces:
            stored = manifest.tensors[piece.name]
            filled = sum(_copy_shared(path, stored, box, piece) for box in stored.boxes)
            if filled != piece.data.numel():
                return f"{piece.name} is stored with gaps: {filled} of {piece.data.numel()} elements found"
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _copy_shared(path: Path, tensor: StoredTensor, stored: StoredBox, piece: StatePiece) -> int:
    """Copy what a stored box and a piece share; the number of elements copied."""
    shared = stored.box.intersection(piece.box)
    if shared is None:
        return 0
    values = _read_box(path, tensor, stored)
    target = piece.data.view(piece.box.sizes)
    target[shared.slices_within(piece.box)] = values[shared.slices_within(stored.box)].to(target.device)
    return shared.num_elements


def _read_box(path: Path, tensor: StoredTensor, stored: StoredBox) -> torch.Tensor:
    file_path = path / stored.file
    with open(file_path, "rb") as file:
        file.seek(stored.start)
        raw = np.fromfile(file, dtype=np.uint8, count=stored.num_bytes)
    if raw.size != stored.num_bytes:
        raise CheckpointError(f"{file_path} ends {stored.num_bytes - raw.size} bytes early")
    if zlib.crc32(raw.data) != stored.crc32:
        raise CheckpointError(f"{file_path} is damaged: the checksum of the bytes at {stored.start} does not match")
    return torch.from_numpy(raw).view(getattr(torch, tensor.dtype)).view(stored.box.sizes)

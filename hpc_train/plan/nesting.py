"""Orders in which blocks fill seats: the axes nested in each other, an axis cut into runs where that helps.

Filling seats in the order of the switches keeps near what follows closely in that order. With an axis whole inside
another, one of them has all its traffic between leaves; with runs of both inside each other a leaf holds a tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpc_train.plan.mesh import Mesh

BLOCK_AXES = ("pp", "dp", "cp")


@dataclass(frozen=True)
class Piece:
    """A part of an axis: places apart by `step`, `extent` of them; the whole axis has step 1 and its degree."""

    axis: str
    step: int
    extent: int


@dataclass(frozen=True)
class Surroundings:
    """Blocks of a host, a leaf and a pod in the mean, and what passing each costs more, in thousandths of hops."""

    sizes: tuple[float, float, float]
    costs: tuple[int, int, int]


def fill_order(mesh: Mesh, pieces: Sequence[Piece], *, is_snake: bool = False, host_size: int = 1) -> np.ndarray:
    """Blocks in the order of the pieces, innermost first.

    is_snake: turn at each end, so that blocks that follow each other are neighbours. host_size: blocks of a host; what
    is inside one is folded, so that neighbours in two hosts are on the same slot, which is the same rail.
    """
    shape = (mesh.pp, mesh.dp, mesh.cp)
    place = dict(zip(BLOCK_AXES, np.unravel_index(np.arange(np.prod(shape)), shape), strict=True))
    inside, outside = _cut_at_hosts(pieces, host_size)
    keys = []
    for piece in inside:
        digit = place[piece.axis] // piece.step % piece.extent
        is_turned = place[piece.axis] // (piece.step * piece.extent) % 2 == 1
        keys.append(np.where(is_turned, -digit, digit))
    for at, piece in enumerate(outside):
        digit = place[piece.axis] // piece.step % piece.extent
        if is_snake:
            others = [outer for outer in outside[at + 1 :] if outer.axis != piece.axis]
            turns = sum((place[outer.axis] // outer.step % outer.extent for outer in others), np.zeros_like(digit))
            digit = np.where(turns % 2 == 0, digit, -digit)
        keys.append(digit)
    return np.lexsort(keys) if keys else np.arange(len(place["dp"]))


def _cut_at_hosts(pieces: Sequence[Piece], host_size: int) -> tuple[list[Piece], list[Piece]]:
    """The pieces inside a host and those outside; one that is partly inside is cut."""
    inside: list[Piece] = []
    outside: list[Piece] = []
    room = host_size
    for piece in pieces:
        if outside or room == 1:
            outside.append(piece)
        elif piece.extent <= room:
            inside.append(piece)
            room //= piece.extent
        else:
            inside.append(Piece(piece.axis, piece.step, room))
            outside.append(Piece(piece.axis, piece.step * room, -(-piece.extent // room)))
    return inside, outside


def whole_axes(mesh: Mesh, axes: Sequence[str]) -> tuple[Piece, ...]:
    """The nesting of uncut axes, innermost first."""
    return tuple(Piece(axis, 1, getattr(mesh, axis)) for axis in axes)


def nestings(mesh: Mesh) -> Iterator[tuple[Piece, ...]]:
    """All orders of the axes that have more than one place, none, one or two of them cut into runs."""
    active = [axis for axis in BLOCK_AXES if getattr(mesh, axis) > 1]
    for num_cut in range(min(2, len(active)) + 1):
        for cut in itertools.combinations(active, num_cut):
            for runs in itertools.product(*(_run_lengths(getattr(mesh, axis)) for axis in cut)):
                yield from _interleaved(mesh, active, dict(zip(cut, runs, strict=True)))


def _interleaved(mesh: Mesh, active: Sequence[str], run_of: Mapping[str, int]) -> Iterator[tuple[Piece, ...]]:
    names = [axis for axis in active for _ in range(2 if axis in run_of else 1)]
    for order in sorted(set(itertools.permutations(names))):
        if any(one == other for one, other in itertools.pairwise(order)):
            continue
        pieces: list[Piece] = []
        for at, axis in enumerate(order):
            degree, run = getattr(mesh, axis), run_of.get(axis)
            if run is None:
                pieces.append(Piece(axis, 1, degree))
            elif axis in order[:at]:
                pieces.append(Piece(axis, run, -(-degree // run)))
            else:
                pieces.append(Piece(axis, 1, run))
        yield tuple(pieces)


def _run_lengths(degree: int) -> list[int]:
    """Lengths of runs to try: about a factor of 1.5 apart, and what divides the degree well."""
    wanted = {2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512}
    return sorted(run for run in wanted if run < degree)


def expected_cost(
    mesh: Mesh, pieces: Sequence[Piece], bytes_of: Mapping[str, tuple[int, int]], around: Surroundings
) -> float:
    """Estimate the byte-hops of a filling, to sort fillings before the best are measured.

    Two blocks at a distance d in the order are in different leaves of m blocks with a chance of d / m. bytes_of: of
    each axis, between neighbours and between the ends.
    """
    total = 0.0
    for axis, (between, ends) in bytes_of.items():
        degree = getattr(mesh, axis)
        groups = mesh.world_size // mesh.tp // degree
        stride, inner, outer = 1, 0, 0
        steps: list[tuple[int, int]] = []
        for piece in pieces:
            if piece.axis == axis:
                if piece.step == 1:
                    inner, run = stride, piece.extent
                    steps.append((degree - -(-degree // run), stride))
                else:
                    outer = stride
                    steps.append((piece.extent - 1, abs(stride - (run - 1) * inner)))
            stride *= piece.extent
        length = (run - 1) * inner if not outer else (-(-degree // run) - 1) * outer
        total += groups * between * sum(count * around_cost(around, distance) for count, distance in steps)
        total += groups * ends * around_cost(around, length)
    return total


def around_cost(around: Surroundings, distance: int) -> float:
    return sum(min(1.0, distance / size) * more for size, more in zip(around.sizes, around.costs, strict=True))


PARTS_COMBINED = 24
"""Up to so many parts any of them may be joined to reach a border, else two (assumed; it bounds the work)."""


def aligned_order(sizes: Sequence[int], unit: int, start: int = 0) -> list[int]:
    """An order of parts of these sizes in which borders fall on multiples of a unit, as often as can be had.

    At each border come the fewest parts that end on a multiple together; where there are none, all that remain.
    start: what is filled before the first part.
    """
    remaining = list(range(len(sizes)))
    order: list[int] = []
    at = start
    while remaining:
        chosen = _fewest_parts([sizes[part] % unit for part in remaining], -at % unit, unit) or range(len(remaining))
        parts = [remaining[index] for index in chosen]
        order += parts
        at += sum(sizes[part] for part in parts)
        remaining = [part for part in remaining if part not in parts]
    return order


def _fewest_parts(residues: Sequence[int], rest: int, unit: int) -> list[int]:
    """Indices of the fewest residues, one at least, that add up to `rest` modulo the unit; none where none do."""
    if rest in residues:
        return [residues.index(rest)]
    if rest == 0:
        others = _fewest_parts(residues[1:], -residues[0] % unit, unit)
        return [0, *(1 + index for index in others)] if others else []
    if len(residues) > PARTS_COMBINED:
        last = {residue: index for index, residue in enumerate(residues)}
        pairs = ([index, last.get((rest - residue) % unit, index)] for index, residue in enumerate(residues))
        return next((pair for pair in pairs if pair[0] != pair[1]), [])
    unreached = len(residues) + 1
    fewest = np.full(unit, unreached)
    fewest[0] = 0
    is_shorter: list[np.ndarray] = []
    for residue in residues:
        longer = np.roll(fewest, residue) + 1
        is_shorter.append(longer < fewest)
        fewest = np.minimum(fewest, longer)
    if fewest[rest] >= unreached:
        return []
    chosen: list[int] = []
    for index in reversed(range(len(residues))):
        if is_shorter[index][rest]:
            chosen.append(index)
            rest = (rest - residues[index]) % unit
    return chosen[::-1]

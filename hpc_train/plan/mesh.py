"""The grid of ranks: how many along each axis, and which coordinates each rank has.

Ranks are numbered row-major over (pp, dp, cp, tp), so neighbours in tp have neighbouring ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hpc_train.errors import ConfigError
from hpc_train.plan.changes import Change, SizesError, nearest

AXES = ("pp", "dp", "cp", "tp")
"""Axis names, outermost first; the last one varies fastest."""


MAX_RANKS = 2**20
"""assumed: more than any machine has GPUs; it keeps a slip of the finger from filling the memory."""
_MOST_PAIRS = 12
"""Of pp and tp that a refusal proposes together (assumed: enough for some to pass the other checks)."""


@dataclass(frozen=True)
class Mesh:
    """Degrees of the four axes; their product is the world size."""

    pp: int
    dp: int
    cp: int
    tp: int

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ConfigError(
                    f"{axis}={degree!r} is not a degree of a mesh; it must be a whole number of 1 or more"
                )

    @staticmethod
    def fill(
        world_size: int,
        *,
        pp: int = 1,
        dp: int | None = None,
        cp: int = 1,
        tp: int = 1,
        possible: Mapping[str, Collection[int]] | None = None,
    ) -> Mesh:
        """The mesh of exactly `world_size` ranks; dp left out is what the other axes leave over.

        possible: by axis the degrees that a refusal may advise; an axis that is not named has any.

        Raises:
            ConfigError: the degrees do not fill the world, with each factor, the remainder and the nearest
                choices that would.
        """
        if world_size > MAX_RANKS:
            raise ConfigError(
                f"a world of {world_size} ranks is more than the {MAX_RANKS} that are planned for; give fewer nodes or "
                "ranks per node"
            )
        if world_size < 1:
            raise ConfigError(f"a world of {world_size} ranks cannot be filled; give at least 1 rank")
        mesh = Mesh(pp=pp, dp=1 if dp is None else dp, cp=cp, tp=tp)
        others = pp * cp * tp
        if dp is None:
            if world_size % others == 0:
                return Mesh(pp=pp, dp=world_size // others, cp=cp, tp=tp)
            raise _not_divisible(world_size, mesh, possible or {})
        if mesh.world_size != world_size:
            raise _not_equal(world_size, mesh, possible or {})
        return mesh

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def axes(self) -> dict[str, int]:
        """Degree of each axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def coords(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the mesh of {self.world_size} ranks")
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return {axis: place[axis] for axis in AXES}

    def rank_of(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates; an axis left out is at 0."""
        rank = 0
        for axis, place in zip(AXES, (pp, dp, cp, tp), strict=True):
            degree = getattr(self, axis)
            if not 0 <= place < degree:
                raise ValueError(f"{axis}={place} is outside the mesh, where {axis} has {degree} places")
            rank = rank * degree + place
        return rank

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups along one axis, each in the order of its coordinate, sorted by their first rank.

        Every rank is in exactly one of them; an axis of degree 1 gives groups of one.
        """
        if axis not in AXES:
            raise ValueError(f"{axis!r} is not an axis of the mesh; axes are {', '.join(AXES)}")
        degree = getattr(self, axis)
        inner = math.prod(getattr(self, other) for other in AXES[AXES.index(axis) + 1 :])
        firsts = (block + offset for block in range(0, self.world_size, inner * degree) for offset in range(inner))
        return tuple(tuple(range(first, first + inner * degree, inner)) for first in firsts)

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """The one group along `axis` that holds `rank`, without building the others."""
        coords = self.coords(rank)
        return tuple(self.rank_of(**{**coords, axis: place}) for place in range(getattr(self, axis)))

    def describe(self) -> str:
        return _product(self.axes)


def _product(axes: Mapping[str, int | None]) -> str:
    return " x ".join(f"{axis} {'?' if degree is None else degree}" for axis, degree in axes.items())


def _not_divisible(world_size: int, mesh: Mesh, possible: Mapping[str, Collection[int]]) -> SizesError:
    others = mesh.pp * mesh.cp * mesh.tp
    asked = _product({**mesh.axes, "dp": None})
    return SizesError(
        f"{world_size} ranks do not fill a mesh of {asked}: pp x cp x tp = {others} leaves a remainder of "
        f"{world_size % others}.",
        _nearest_changes(world_size, mesh, possible, is_dp_given=False),
        _nearest(world_size, mesh, possible),
    )


def _not_equal(world_size: int, mesh: Mesh, possible: Mapping[str, Collection[int]]) -> SizesError:
    others = mesh.pp * mesh.cp * mesh.tp
    problem = (
        f"{world_size} ranks do not fill a mesh of {mesh.describe()} = {mesh.world_size} ranks: "
        f"{abs(world_size - mesh.world_size)} {'left over' if world_size > mesh.world_size else 'missing'}."
    )
    advice = f"Start {mesh.world_size} ranks"
    if world_size % others == 0:
        advice += f", or use dp={world_size // others}, or leave dp out."
    else:
        advice += f". {_nearest(world_size, mesh, possible)}"
    changes = _nearest_changes(world_size, mesh, possible, is_dp_given=True)
    return SizesError(problem, [Change(num_ranks=mesh.world_size), *changes], advice)


def _nearest_changes(
    world_size: int, mesh: Mesh, possible: Mapping[str, Collection[int]], *, is_dp_given: bool
) -> list[Change]:
    """Numbers of ranks that the mesh fills, and degrees that fill so many ranks, with a dp that goes along."""
    others = mesh.pp * mesh.cp * mesh.tp
    found = []
    if is_dp_given and world_size % others == 0:
        found.append(Change({"parallel.dp": world_size // others}))
    for axis, degrees in _fitting_degrees(world_size, mesh, possible).items():
        for degree in degrees:
            found.append(Change({f"parallel.{axis}": degree}))
    found += [Change({"parallel.pp": pp, "parallel.tp": tp}) for pp, tp in _fitting_pairs(world_size, mesh, possible)]
    if not is_dp_given:
        found += [Change(num_ranks=ranks) for ranks in _nearest_worlds(world_size, others)]
    return found


def _nearest(world_size: int, mesh: Mesh, possible: Mapping[str, Collection[int]]) -> str:
    worlds = _nearest_worlds(world_size, mesh.pp * mesh.cp * mesh.tp)
    degrees = [
        f"{axis}={' or '.join(map(str, near))}" for axis, near in _fitting_degrees(world_size, mesh, possible).items()
    ]
    with_ranks = f"; with {world_size} ranks use {', or '.join(degrees)}." if degrees else "."
    return f"With these degrees use {' or '.join(map(str, worlds))} ranks{with_ranks}"


def _nearest_worlds(world_size: int, others: int) -> list[int]:
    below = world_size - world_size % others
    return [ranks for ranks in (below, below + others) if ranks > 0]


def _fitting_degrees(world_size: int, mesh: Mesh, possible: Mapping[str, Collection[int]]) -> dict[str, list[int]]:
    """The nearest values of each axis above 1 that would divide, the other axes being kept."""
    found = {}
    for axis in ("tp", "cp", "pp"):
        degree = getattr(mesh, axis)
        rest = mesh.pp * mesh.cp * mesh.tp // degree
        if degree == 1 or world_size % rest:
            continue
        left = world_size // rest
        fits = [n for n in possible.get(axis, range(1, left + 1)) if n <= left and left % n == 0]
        found[axis] = sorted(nearest(fits, degree)[:3])
    return found


def _fitting_pairs(world_size: int, mesh: Mesh, possible: Mapping[str, Collection[int]]) -> list[tuple[int, int]]:
    """The nearest pp and tp, both other ones, that a model can be split by and that would divide."""

    def factor(pair: tuple[int, int]) -> float:
        return math.prod(max(new, old) / min(new, old) for new, old in zip(pair, (mesh.pp, mesh.tp), strict=True))

    left = world_size // mesh.cp if world_size % mesh.cp == 0 else 0
    degrees = [
        [degree for degree in possible.get(axis, ()) if left and left % degree == 0 and degree != getattr(mesh, axis)]
        for axis in ("pp", "tp")
    ]
    pairs = [(pp, tp) for pp in degrees[0] for tp in degrees[1] if left % (pp * tp) == 0]
    return sorted(pairs, key=factor)[:_MOST_PAIRS]

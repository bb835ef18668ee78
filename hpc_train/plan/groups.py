"""Which groups of ranks exist, of which ranks each is made, and in which order they are made.

A kind of group is one axis or several flattened: ranks that differ in these axes only are together, in the order of
their ranks. Of each kind a rank is in one group at most, and all ranks make the kinds in the same order. So a rank that
waits in one kind waits only for ranks that are still making earlier kinds; those of the earliest kind wait for nobody,
and no circle can form.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hpc_train.plan.mesh import AXES, Mesh

WORLD = "world"
"""The group of all ranks, which is there before any other."""
HDP = "hdp"
"""dp and cp flattened: over these ranks gradients are summed, and sequences of any length are spread."""
MODEL = "model"
"""pp and tp flattened: the ranks that hold one copy of the model; norms are summed over them."""
BACKWARD = "pp_backward"
"""The pipeline's ranks once more: what goes to earlier stages travels apart from what goes to later ones."""
TIED = "tied"
"""First and last stage of a pipeline, which hold a copy each of tied embeddings."""


@dataclass(frozen=True)
class GroupKind:
    """A kind of group.

    axes: flattened, outermost first. ends_only: of each group only its first and last rank. is_apart: it has a
    communicator of its own even where an earlier kind has the same ranks, since both are used at the same time.
    """

    name: str
    axes: tuple[str, ...]
    ends_only: bool = False
    is_apart: bool = False


def kind_of(*axes: str) -> GroupKind:
    """The kind that flattens these axes; the name is theirs, joined: kind_of("dp", "tp").name is "dp_tp"."""
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown or not axes or len(set(axes)) != len(axes):
        asked = ", ".join(axes) or "nothing"
        raise ValueError(f"{asked} was asked for as axes of a group; give one or more of {', '.join(AXES)}, each once")
    ordered = tuple(axis for axis in AXES if axis in axes)
    return GroupKind("_".join(ordered), ordered)


AXIS_KINDS = tuple(kind_of(axis) for axis in reversed(AXES))
"""The four axes, innermost first."""
COMMON_KINDS = (*AXIS_KINDS, GroupKind(HDP, ("dp", "cp")), GroupKind(MODEL, ("pp", "tp")))
"""What nearly every script needs."""
TRAINING_KINDS = (
    *COMMON_KINDS,
    GroupKind(BACKWARD, ("pp",), is_apart=True),
    GroupKind(TIED, ("pp",), ends_only=True),
)
"""Every kind that training needs, in the order in which they are made."""


@dataclass(frozen=True)
class GroupPlan:
    """The groups of a mesh, and the order in which all ranks make them: that of `kinds`.

    Raises:
        ValueError: two kinds of one name, or a kind of axes that the mesh has not.
    """

    mesh: Mesh
    kinds: tuple[GroupKind, ...] = TRAINING_KINDS

    def __post_init__(self) -> None:
        names = [kind.name for kind in self.kinds]
        twice = sorted({name for name in names if names.count(name) > 1 or name == WORLD})
        if twice:
            raise ValueError(f"{', '.join(twice)} is asked for twice; each kind of group has a name of its own")
        for kind in self.kinds:
            kind_of(*kind.axes)

    def kind(self, name: str) -> GroupKind:
        """The kind of this name.

        Raises:
            ValueError: the plan has none.
        """
        for kind in self.kinds:
            if kind.name == name:
                return kind
        raise ValueError(
            f"{name!r} is no axis and no kind of group of this plan; it has {', '.join(k.name for k in self.kinds)}"
        )

    def group_size(self, name: str) -> int:
        kind = self.kind(name)
        size = math.prod(getattr(self.mesh, axis) for axis in kind.axes)
        return min(size, 2) if kind.ends_only else size

    def groups(self, name: str) -> np.ndarray:
        """All groups of a kind: (num_groups, group_size) ranks, each row ascending, rows by their first rank.

        Every rank is in exactly one row, but for `ends_only`, which leaves out the ranks between.
        """
        kind = self.kind(name)
        kept = [AXES.index(axis) for axis in AXES if axis not in kind.axes]
        flattened = [AXES.index(axis) for axis in AXES if axis in kind.axes]
        size = math.prod(getattr(self.mesh, axis) for axis in kind.axes)
        rows = self._grid.transpose(*kept, *flattened).reshape(-1, size)
        return rows[:, [0, -1]] if kind.ends_only and size > 2 else rows

    def group_of(self, rank: int, name: str) -> tuple[int, ...]:
        """The group of a kind that holds `rank`, without listing the others; (rank,) where it is in none."""
        kind = self.kind(name)
        coords = self.mesh.coords(rank)
        place = tuple(slice(None) if axis in kind.axes else coords[axis] for axis in AXES)
        ranks = [int(member) for member in self._grid[place].ravel()]
        if kind.ends_only:
            ranks = list(dict.fromkeys((ranks[0], ranks[-1])))
        return tuple(ranks) if rank in ranks else (rank,)

    def group_index(self, name: str) -> np.ndarray:
        """For each rank the row of `groups` that it is in, -1 where it is in none: (world_size,)."""
        index = np.full(self.mesh.world_size, -1, dtype=np.int32)
        rows = self.groups(name)
        index[rows] = np.arange(len(rows), dtype=np.int32)[:, None]
        return index

    def same_as(self, name: str) -> str:
        """Where the communicator of a kind comes from: its own name, or the kind made before it with the same ranks.

        WORLD where the group is all ranks.
        """
        return self._sources[self.kind(name).name]

    @cached_property
    def made(self) -> tuple[GroupKind, ...]:
        """The kinds for which a communicator is made, in order: none for groups of one, none twice."""
        return tuple(k for k in self.kinds if self.group_size(k.name) > 1 and self._sources[k.name] == k.name)

    @cached_property
    def hash(self) -> str:
        """Equal on two ranks exactly if they would make the same groups in the same order."""
        kinds = [[kind.name, kind.axes, kind.ends_only, kind.is_apart] for kind in self.kinds]
        text = json.dumps([self.mesh.axes, kinds], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def listing(self) -> dict[str, list[list[int]]]:
        """All groups of all kinds, as plan.json has them."""
        return {kind.name: self.groups(kind.name).tolist() for kind in self.kinds}

    def with_kinds(self, kinds: Iterable[GroupKind]) -> GroupPlan:
        """This plan with further kinds, made after all others; kinds that it has already are left as they are."""
        return GroupPlan(self.mesh, (*self.kinds, *(kind for kind in kinds if kind not in self.kinds)))

    @cached_property
    def _grid(self) -> np.ndarray:
        return np.arange(self.mesh.world_size, dtype=np.int32).reshape(*self.mesh.axes.values())

    @cached_property
    def _sources(self) -> dict[str, str]:
        """By kind, whose communicator it uses. Two kinds have the same groups where their axes above degree 1 agree."""
        first_of: dict[tuple[object, ...], str] = {}
        sources = {}
        for kind in self.kinds:
            wide = tuple(axis for axis in AXES if axis in kind.axes and getattr(self.mesh, axis) > 1)
            size = math.prod(getattr(self.mesh, axis) for axis in wide)
            shape = (wide, kind.ends_only and size > 2)
            if kind.is_apart:
                sources[kind.name] = kind.name
            elif size == self.mesh.world_size and not shape[1]:
                sources[kind.name] = WORLD
            else:
                sources[kind.name] = first_of.setdefault(shape, kind.name)
        return sources


def training_plan(mesh: Mesh, *, with_tied: bool) -> GroupPlan:
    """The groups that `hpc-train run` makes: its norm is part of one sum over all ranks, so MODEL is not among them.

    with_tied: the model's first and last layer share their embeddings.
    """
    left_out = {MODEL} if with_tied else {MODEL, TIED}
    return GroupPlan(mesh, tuple(kind for kind in TRAINING_KINDS if kind.name not in left_out))

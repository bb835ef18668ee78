"""The plan of a run: which rank each slot of each node is, made once from what the site really gave.

One process makes it at each start; every other reads plan.json, compares the hash and looks itself up. A
slot is a task's index on its node, which is also the index of its GPU among the job's GPUs of that node.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any

from hpc_train.cluster.allocation import Allocation
from hpc_train.errors import LaunchError
from hpc_train.plan.groups import GroupPlan
from hpc_train.plan.json_object import Kinds, parse_object
from hpc_train.plan.mesh import AXES, Mesh
from hpc_train.plan.parameters import possible_degrees

if TYPE_CHECKING:
    from hpc_train.config import Config
    from hpc_train.plan.placement import Placement

VERSION = 1
MAX_RANKS_WITH_GROUPS = 4096
"""Above this the groups are left out of the file: they follow from the axes, and would be most of it."""

_KINDS: dict[str, Kinds] = {"version": (int,), "hash": (str,), "world_size": (int,), "axes": (dict,), "ranks": (list,)}
_WRITE_NEW = "Let `hpc-train run` write a new one"

RANKS_TSV_COLUMNS = (
    "rank", "host", "node_rank", "local_rank", "gpu", "nic", "rail", "slurm_procid", *AXES,
)  # fmt: skip


@dataclass(frozen=True)
class PlannedRank:
    """One rank and its place. `gpu` is the slot on the node: SLURM_LOCALID, or mpirun's local rank."""

    rank: int
    node: str
    gpu: int
    coords: Mapping[str, int]


RAILS = "rails"
"""In plan.json: by rank the rail of its traffic, where the fabric says it."""


@dataclass(frozen=True)
class RankFacts:
    """What is known of a rank beside its place in the plan; None: not known."""

    nic: str | None = None
    rail: int | None = None
    slurm_procid: int | None = None


@dataclass(frozen=True)
class Plan:
    """Who is which rank. `further` keeps whatever else the file holds (other axes, traffic, estimates)."""

    mesh: Mesh
    ranks: tuple[PlannedRank, ...]
    groups: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    version: int = VERSION
    further_axes: Mapping[str, int] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Nodes in the order of their first rank; a node's index here is its node_rank."""
        return tuple(dict.fromkeys(planned.node for planned in self.ranks))

    @cached_property
    def hash(self) -> str:
        return _hash_of(self._document)

    def seats(self) -> dict[str, Any]:
        """Who was which rank, short enough for each checkpoint: by rank its node, as an index, and its slot there."""
        number = {node: index for index, node in enumerate(self.nodes)}
        return {
            "hash": self.hash,
            "axes": {**self.mesh.axes, **self.further_axes},
            "nodes": list(self.nodes),
            "node_of_rank": [number[planned.node] for planned in self.ranks],
            "gpu_of_rank": [planned.gpu for planned in self.ranks],
        }

    def with_groups(self) -> Plan:
        """The same plan with all its groups listed, however many ranks it has."""
        return self if self.groups else replace(self, groups=_listed_groups(self.mesh))

    def lookup(self, node: str, gpu: int) -> int:
        """The rank planned for a slot of a node.

        Raises:
            LaunchError: no rank was planned there, with what was planned on that node.
        """
        rank = self._rank_by_place.get((node, gpu))
        if rank is not None:
            return rank
        slots = sorted(planned.gpu for planned in self.ranks if planned.node == node)
        if slots:
            found = f"on {node} the plan has only slots {ranges_text(slots)}"
        else:
            more = ", ..." if len(self.nodes) > 8 else ""
            found = f"the plan has no node of that name (it has {', '.join(self.nodes[:8])}{more})"
        raise LaunchError(
            f"no rank is planned for slot {gpu} of node {node}: {found}. The tasks were started otherwise "
            "than planned; start them by `hpc-train run` or `hpc-train exec`, which plan and then start them"
        )

    def to_json(self) -> str:
        """The file: a line for each entry, and for each rank."""
        document = {"version": self.version, "hash": self.hash, **self._document}
        texts = {key: json.dumps(value) for key, value in document.items() if key != "ranks"}
        # Not by `indent`, with which Python's encoder takes a second for 16,384 ranks.
        texts["ranks"] = "[\n  " + ",\n  ".join(map(json.dumps, document["ranks"])) + "\n ]"
        return "{\n " + ",\n ".join(f"{json.dumps(key)}: {texts[key]}" for key in document) + "\n}\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan and check its hash; axes and entries of later versions are kept.

        Raises:
            LaunchError: not a plan, or its hash does not fit its content.
        """
        try:
            document = parse_object(text, _KINDS)
            stated = document.pop("hash")
            plan = _from_document(dict(document))
        except KeyError as problem:
            raise LaunchError(f"this is not a plan.json: it lacks the key {problem}. {_WRITE_NEW}") from problem
        except (ValueError, TypeError, AttributeError) as problem:
            raise LaunchError(f"this is not a plan.json: {problem}. {_WRITE_NEW}") from problem
        actual = _hash_of(document)
        if actual != stated:
            raise LaunchError(
                f"plan.json states the hash {stated}, but its content has {actual}: it was changed or is "
                f"incomplete. {_WRITE_NEW}"
            )
        return plan

    def ranks_tsv(self, facts: Sequence[RankFacts] = ()) -> str:
        """The table of ranks, with the facts of each where they are given; what is not known is `-`."""
        node_ranks = {node: index for index, node in enumerate(self.nodes)}
        lines = ["\t".join(RANKS_TSV_COLUMNS)]
        for planned, known in zip(self.ranks, facts or repeat(RankFacts()), strict=False):
            place = (planned.rank, planned.node, node_ranks[planned.node], planned.gpu, planned.gpu)
            further = (known.nic, known.rail, known.slurm_procid)
            coords = [planned.coords.get(axis, 0) for axis in AXES]
            lines.append("\t".join("-" if value is None else str(value) for value in (*place, *further, *coords)))
        return "\n".join(lines) + "\n"

    @cached_property
    def _rank_by_place(self) -> dict[tuple[str, int], int]:
        return {(planned.node, planned.gpu): planned.rank for planned in self.ranks}

    @cached_property
    def _document(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "world_size": self.world_size,
            "axes": {**self.mesh.axes, **self.further_axes},
            "ranks": [
                {
                    "rank": planned.rank,
                    "node": planned.node,
                    "gpu": planned.gpu,
                    "coords": dict(planned.coords),
                }
                for planned in self.ranks
            ],
            "groups": {kind: [list(group) for group in groups] for kind, groups in self.groups.items()},
            **self.further,
        }


def world_mesh(config: Config, allocation: Allocation) -> Mesh:
    """The mesh of all ranks of an allocation.

    Raises:
        ConfigError: the degrees do not fill the world.
    """
    return mesh_of(config, sum(allocation.tasks_per_node))


def mesh_of(config: Config, world_size: int) -> Mesh:
    """The mesh that a configuration makes of so many ranks.

    Raises:
        ConfigError: the degrees do not fill the world.
    """
    parallel, possible = config.parallel, possible_degrees(config.model)
    return Mesh.fill(world_size, pp=parallel.pp, dp=parallel.dp, cp=parallel.cp, tp=parallel.tp, possible=possible)


def plan_mesh(mesh: Mesh, allocation: Allocation) -> Plan:
    """Number the ranks node by node in the allocation's order and fill the mesh with them."""
    slots = [
        (node, slot)
        for node, tasks in zip(allocation.nodes, allocation.tasks_per_node, strict=True)
        for slot in range(tasks)
    ]
    return _plan_slots(mesh, slots, {})


def plan_placement(placement: Placement, figures: Mapping[str, Any]) -> Plan:
    """Ranks where a placement puts them; `figures` are kept in the file and hashed with it."""
    names = [placement.nodes[node] for node in placement.node_of_rank.tolist()]
    return _plan_slots(placement.mesh, list(zip(names, placement.gpu_of_rank.tolist(), strict=True)), figures)


def _plan_slots(mesh: Mesh, slots: Sequence[tuple[str, int]], figures: Mapping[str, Any]) -> Plan:
    ranks = tuple(PlannedRank(rank, node, slot, mesh.coords(rank)) for rank, (node, slot) in enumerate(slots))
    groups = _listed_groups(mesh) if len(ranks) <= MAX_RANKS_WITH_GROUPS else {}
    return Plan(mesh, ranks, groups, further=figures)


def _listed_groups(mesh: Mesh) -> dict[str, tuple[tuple[int, ...], ...]]:
    return {kind: tuple(map(tuple, groups)) for kind, groups in GroupPlan(mesh).listing().items()}


def _from_document(document: dict[str, Any]) -> Plan:
    axes = dict(document.pop("axes"))
    ranks = tuple(
        PlannedRank(int(entry["rank"]), str(entry["node"]), int(entry["gpu"]), dict(entry["coords"]))
        for entry in document.pop("ranks")
    )
    if [planned.rank for planned in ranks] != list(range(document.pop("world_size"))):
        raise ValueError("its ranks are not 0 to world_size - 1 in order")
    return Plan(
        mesh=Mesh(**{axis: axes.pop(axis) for axis in AXES}),
        ranks=ranks,
        groups={kind: tuple(tuple(group) for group in groups) for kind, groups in document.pop("groups", {}).items()},
        version=document.pop("version"),
        further_axes=axes,
        further=document,
    )


def _hash_of(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def ranges_text(numbers: Sequence[int]) -> str:
    """0-3,6: sorted whole numbers, runs joined."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)

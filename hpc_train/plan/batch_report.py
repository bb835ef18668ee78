"""A step's batch plan for people: who does what, how long it takes by the costs, and against rings of one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hpc_train.config import Config
from hpc_train.errors import ConfigError
from hpc_train.plan.batch_cost import Integers
from hpc_train.plan.batch_of_run import Places, set_up_batches
from hpc_train.plan.batch_problem import lower_bound
from hpc_train.plan.batch_profile import Profile, passed_bytes
from hpc_train.plan.batch_setup import BatchSetup
from hpc_train.plan.batch_spans import PackSpans, pack_spans
from hpc_train.plan.batch_table import BatchTable
from hpc_train.plan.batch_times import BatchTimes, PassedBytes, model_times, ring_bytes
from hpc_train.plan.mesh import Mesh
from hpc_train.plan.table import Section, size_text, table_text, time_text

_MOST_RINGS = 12
_MOST_RANKS = 16
"""Listed in the text; the page and the JSON have all."""


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """One planner's plan of the step, played by the costs. tokens: of each rank."""

    name: str
    table: BatchTable
    times: BatchTimes
    spans: PackSpans

    @property
    def is_ring(self) -> Any:
        """By pack: several ranks have it."""
        return self.table.sizes > 1

    @cached_property
    def tokens(self) -> Integers:
        """Of each rank: its parts of rings' sequences, without their padding, and what it has alone."""
        table = self.table
        found = np.zeros(table.num_ranks, np.int64)
        is_alone = np.repeat(~self.is_ring, table.sizes)
        np.add.at(found, table.ranks[is_alone], table.pack_sums()[1][~self.is_ring])
        for pack in np.flatnonzero(self.is_ring).tolist():
            members = table.ranks[table.first_rank[pack] : table.first_rank[pack + 1]]
            sequences = table.sequences[table.first_sequence[pack] : table.first_sequence[pack + 1]]
            found[members] += _ring_shares(table.lengths[sequences], len(members))
        return found

    @cached_property
    def rings_of_rank(self) -> Integers:
        """How many micro-batches of each rank are shared with others."""
        found = np.zeros(self.table.num_ranks, np.int64)
        np.add.at(found, self.table.ranks, np.repeat(self.is_ring, self.table.sizes).astype(np.int64))
        return found


def _ring_shares(lengths: Integers, size: int) -> Integers:
    """Tokens of each place of a ring, whose ranks have two parts of each sequence as `zigzag` cuts them."""
    edges = np.arange(2 * size + 1) * lengths[:, None] // (2 * size)
    parts = np.diff(edges).sum(axis=0)
    return np.asarray(parts[:size] + parts[: -size - 1 : -1], np.int64)


@dataclass(frozen=True, eq=False)
class BatchReport:
    """nodes: of each hdp rank; empty where not known. static: None where rings of one size cannot hold the step.

    least: the time in ticks of a layer that no plan can beat. passed: in rings, of a token and all layers of a rank.
    planning_s: how long planning took; None where it was not measured.
    """

    name: str
    mesh: Mesh
    step: int
    setup: BatchSetup
    lengths: Integers
    nodes: tuple[str, ...]
    planned: PlannedBatch
    static: PlannedBatch | None
    least: int
    passed: PassedBytes
    notes: tuple[str, ...]
    planning_s: float | None = None

    @property
    def plans(self) -> tuple[PlannedBatch, ...]:
        return (self.planned,) if self.static is None else (self.planned, self.static)

    @property
    def title(self) -> str:
        longest, tokens = int(self.lengths.max(initial=0)), int(self.lengths.sum())
        return (
            f"{self.name}, step {self.step}: {len(self.lengths)} sequences with {tokens} tokens, the longest with "
            f"{longest}, on {self.planned.table.num_ranks} hdp ranks ({self.mesh.describe()})"
        )

    def seconds(self, ticks: int | float) -> float:
        """Of all layers of a rank."""
        return float(ticks) * self.setup.costs.tick_s * self.setup.num_layers


def report_batch(
    config: Config,
    mesh: Mesh,
    step: int,
    lengths: Sequence[int],
    profile: Profile,
    nodes: Sequence[str] = (),
    places: Places | None = None,
) -> BatchReport:
    """Plan a step as the run's configuration says, and with rings of one size.

    Args:
        lengths: Tokens of each sequence of the step.
        nodes: Of each hdp rank.
        places: Where hdp ranks are in the network.

    Raises:
        ConfigError: no parallel.hdp, sizes that do not fit, or a sequence that all ranks together cannot hold.
    """
    setup = set_up_batches(config, mesh, profile, nodes, places)
    problem = setup.problem(step, lengths)
    planned = _played(setup.planner, setup, setup.plan_with(setup.planner, problem))
    static, notes = None, [f"costs: {profile.origin}"]
    if setup.planner != "static":
        try:
            static = _played("static", setup, setup.plan_with("static", problem))
        except ConfigError as problem_of_static:
            notes.append(f"static cannot plan this step: {problem_of_static}")
    if static is not None and static.times.makespan < planned.times.makespan and setup.planner == "balanced":
        notes.append("static's lists are shorter, but its longest micro-batch, for which all stages wait, is longer")
    if mesh.pp > 1:
        notes.append("times are of a rank's own list; what stages wait for each other in the pipeline comes beside")
    return BatchReport(
        config.name, mesh, step, setup, problem.lengths, tuple(nodes), planned, static, lower_bound(problem).ticks,
        passed_bytes(config, mesh).times(setup.num_layers), tuple(notes),
    )  # fmt: skip


def _played(name: str, setup: BatchSetup, table: BatchTable) -> PlannedBatch:
    times = model_times(table, setup.ranks, setup.costs)
    return PlannedBatch(name, table, times, pack_spans(table, setup.ranks, setup.costs))


def batch_sections(report: BatchReport) -> tuple[Section, ...]:
    """The tables of the text, which the page has too."""
    return _summary(report), _rings(report), _ranks(report)


def batch_text(report: BatchReport) -> str:
    """For a terminal."""
    parts = [report.title, *(table_text(section) for section in batch_sections(report) if section.rows)]
    parts.append("\n".join(f"note: {note}" for note in report.notes))
    return "\n\n".join(parts) + "\n"


def batch_json(report: BatchReport) -> dict[str, Any]:
    """For a program: figures of each planner, and the planned step pack by pack and rank by rank."""
    planned, table = report.planned, report.planned.table
    sequences, members = (np.split(values, first[1:-1]) for values, first in (
        (table.sequences, table.first_sequence), (table.ranks, table.first_rank)
    ))  # fmt: skip
    spans = planned.spans
    return {
        "step": report.step,
        "axes": report.mesh.axes,
        "lengths": report.lengths.tolist(),
        "hash": table.digest.hex(),
        "least_time_s": report.seconds(report.least),
        "planning_s": report.planning_s,
        "planners": {one.name: _figures(report, one) for one in report.plans},
        "packs": [
            {
                "sequences": sequences[pack].tolist() if table.num_packs else [],
                "ranks": members[pack].tolist(),
                "offload_milli": int(table.offload_milli[pack]),
                "begin_s": report.seconds(int(spans.begins[pack])),
                "end_s": report.seconds(int(spans.ends[pack])),
            }
            for pack in range(table.num_packs)
        ],
        "ranks": [
            {
                "hdp_rank": rank,
                "node": report.nodes[rank] if report.nodes else None,
                "micro_batches": int(table.num_micro_batches[rank]),
                "tokens": int(planned.tokens[rank]),
                "busy_s": report.seconds(int(planned.times.busy[rank])),
                "end_s": report.seconds(int(planned.times.ends[rank])),
            }
            for rank in range(table.num_ranks)
        ],
        "notes": list(report.notes),
    }


def _figures(report: BatchReport, one: PlannedBatch) -> dict[str, Any]:
    rings = one.table.sizes[one.is_ring]
    return {
        "time_s": report.seconds(one.times.makespan),
        "imbalance": one.times.imbalance,
        "to_least": one.times.makespan / max(1, report.least),
        "rings": len(rings),
        "largest_ring": int(rings.max(initial=1)),
        "ring_bytes": ring_bytes(one.table, report.passed),
        "micro_batches": [int(one.table.num_micro_batches.min()), int(one.table.num_micro_batches.max())],
    }


def _summary(report: BatchReport) -> Section:
    of_plans = [_figures(report, one) for one in report.plans]
    longest = of_plans[0]["time_s"]

    def row(name: str, text: Any) -> tuple[str, ...]:
        return (name, *(text(figures) for figures in of_plans))

    def time(figures: dict[str, Any]) -> str:
        ratio = figures["time_s"] / longest if longest else 1.0
        return time_text(figures["time_s"]) + ("" if figures is of_plans[0] else f" ({ratio:.2f}x)")

    rows = [
        row("modelled time of the step", time),
        row("over the least possible", lambda figures: f"{figures['to_least']:.3f}"),
        row("imbalance: longest over mean work", lambda figures: f"{figures['imbalance']:.3f}"),
        row("rings", lambda figures: f"{figures['rings']} of up to {figures['largest_ring']} ranks"),
        row("passed on in rings", lambda figures: size_text(figures["ring_bytes"])),
        row("micro-batches a rank", lambda figures: _range(figures["micro_batches"])),
        ("hash of the plan", *(one.table.digest.hex() for one in report.plans)),
    ]
    if report.planning_s is not None:
        share = report.planning_s / longest if longest else 0.0
        rows.append(("planning takes", f"{time_text(report.planning_s)} ({share:.2%} of the step)", *[""] * (
            len(report.plans) - 1
        )))  # fmt: skip
    return Section("The step", ("", *(one.name for one in report.plans)), tuple(rows))


def _range(low_high: Sequence[int]) -> str:
    low, high = low_high
    return str(low) if low == high else f"{low} to {high}"


def _rings(report: BatchReport) -> Section:
    """The largest rings of the planned step."""
    planned, table = report.planned, report.planned.table
    rings = np.flatnonzero(planned.is_ring)
    chosen = rings[np.argsort(-table.sizes[rings], kind="stable")][:_MOST_RINGS].tolist()
    rows = []
    for pack in chosen:
        members = table.ranks[table.first_rank[pack] : table.first_rank[pack + 1]]
        sequences = table.sequences[table.first_sequence[pack] : table.first_sequence[pack + 1]]
        rows.append(
            (
                str(int(report.lengths[sequences].sum())),
                str(len(members)),
                runs_text(members.tolist()),
                f"{int(table.offload_milli[pack]) / 1000:.0%}",
                time_text(report.seconds(int(planned.spans.begins[pack]))),
                time_text(report.seconds(int(planned.spans.ends[pack]))),
            )
        )
    title = f"rings, the largest {len(chosen)} of {len(rings)}: tokens" if len(rings) > len(chosen) else "rings: tokens"
    return Section("Rings", (title, "ranks", "which", "offload", "from", "to"), tuple(rows))


def _ranks(report: BatchReport) -> Section:
    """All hdp ranks, or those that end last and first."""
    planned, times = report.planned, report.planned.times
    number = planned.table.num_ranks
    chosen = list(range(number))
    header = "hdp rank"
    if number > _MOST_RANKS:
        by_end = np.argsort(-times.ends, kind="stable").tolist()
        chosen = by_end[: _MOST_RANKS // 2] + by_end[-_MOST_RANKS // 2 :]
        header = f"hdp rank ({_MOST_RANKS // 2} that end last, {_MOST_RANKS // 2} that end first)"
    rows = [
        (
            str(rank),
            report.nodes[rank] if report.nodes else "-",
            str(int(planned.table.num_micro_batches[rank])),
            str(int(planned.rings_of_rank[rank])),
            str(int(planned.tokens[rank])),
            time_text(report.seconds(int(times.busy[rank]))),
            time_text(report.seconds(int(times.ends[rank]))),
        )
        for rank in chosen
    ]
    return Section("Ranks", (header, "node", "micro-batches", "in rings", "tokens", "works", "ends"), tuple(rows))


def runs_text(numbers: Sequence[int], most: int = 6) -> str:
    """0-3,6,9-12: members in their order, runs joined, the middle left out of many."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in parts]
    return ",".join(texts if len(texts) <= most else [*texts[: most // 2], "...", *texts[-most // 2 :]])

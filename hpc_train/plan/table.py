"""The report of a plan as tables that a person reads in ten seconds; the page shows the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_train.cluster.fabric import TIERS
from hpc_train.plan.homes import BEYOND_NODE

if TYPE_CHECKING:
    from hpc_train.plan.checkpoint_flow import CheckpointFlow
    from hpc_train.plan.ecmp import EcmpEstimate
    from hpc_train.plan.report import PlanReport
    from hpc_train.plan.traffic import Uplink

_HOME_NAMES = {
    "node": "inside a node",
    "leaf": "under one leaf",
    "spine": "in one pod",
    "core": "over the core",
    BEYOND_NODE: "over the network",
}
_TIER_NAMES = {"node": "inside nodes", "leaf": "through a leaf", "spine": "through a spine", "core": "through the core"}


@dataclass(frozen=True)
class Section:
    """A table: the first column holds names, the others figures."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sections_of(report: PlanReport) -> tuple[Section, ...]:
    """Groups, traffic before and after, and the estimates."""
    return tuple(filter(None, (_groups(report), _traffic(report), _estimates(report))))


def report_text(report: PlanReport) -> str:
    """The whole report for a terminal."""
    parts = [f"{report.name}: {report.size}\n{report.origin}"]
    parts += [table_text(section) for section in sections_of(report)]
    if report.all_notes:
        parts.append("\n".join(f"note: {note}" for note in report.all_notes))
    return "\n\n".join(parts) + "\n"


def summary_line(report: PlanReport) -> str:
    """The plan's gain in one line, for a log."""
    if len(report.placement.nodes) == 1:
        return f"placement: all ranks on {report.placement.nodes[0]}"
    if report.planned is None or report.before is None:
        return f"placement: Slurm's order of nodes, since no topology is known; {_homes_line(report)}"
    if not report.before.byte_hops:
        return f"placement: no traffic between nodes; {_homes_line(report)}"
    ratio = report.planned.byte_hops / report.before.byte_hops
    gain = f"{ratio:.2f}x of Slurm's order" if report.is_moved else "those of Slurm's order"
    hops = f"{size_text(report.planned.byte_hops)} x switches a step"
    return f"placement: byte-hops {gain} ({hops}); {_homes_line(report)}"


def _homes_line(report: PlanReport) -> str:
    return "; ".join(f"{home.axis} {_where(home.by_tier)}" for home in report.homes) or "one rank"


def _groups(report: PlanReport) -> Section | None:
    if not report.homes:
        return None
    sent = {entry.axis: entry.forward_bytes + entry.backward_bytes for entry in report.traffic}
    rows = [
        (
            home.axis,
            str(home.group_size),
            str(home.num_groups),
            size_text(sent[home.axis]) if home.axis in sent else "-",
            _where(home.by_tier),
        )
        for home in report.homes
    ]
    return Section("Groups", ("axis", "ranks", "groups", "a rank sends a step", "where they live"), tuple(rows))


def _where(by_tier: Mapping[str, int]) -> str:
    if len(by_tier) == 1:
        return _HOME_NAMES[next(iter(by_tier))]
    return ", ".join(f"{count} {_HOME_NAMES[tier]}" for tier, count in by_tier.items())


def _traffic(report: PlanReport) -> Section | None:
    before, planned = report.before, report.planned
    if before is None or planned is None:
        return None
    rows: list[tuple[str, ...]] = [
        (_TIER_NAMES[tier], size_text(before.bytes_by_tier.get(tier, 0)), size_text(planned.bytes_by_tier.get(tier, 0)))
        for tier in TIERS
    ]
    ratio = f" ({planned.byte_hops / before.byte_hops:.2f}x)" if before.byte_hops else ""
    rows.append(("bytes x switches", size_text(before.byte_hops), f"{size_text(planned.byte_hops)}{ratio}"))
    rows.append(("busiest uplink", *(_load(side.busiest_uplink) for side in (before, planned))))
    rows.append(("which is that of", *(_name(side.busiest_uplink) for side in (before, planned))))
    if any(side is not None and side.uplinks for side in (report.hashed_before, report.hashed)):
        rows.append(("with hashed links", *(_collision(side) for side in (report.hashed_before, report.hashed))))
    return Section("Traffic a step", ("", "Slurm's order", "planned"), tuple(rows))


def _collision(side: EcmpEstimate | None) -> str:
    """The time on the busiest link, or how many times its even share it carries where speeds are not known."""
    if side is None or not side.uplinks:
        return "-"
    if side.expected_s is not None and side.worst_s is not None:
        return f"{time_text(side.expected_s)}, worst {time_text(side.worst_s)}"
    return f"{side.expected_collision:.1f}x even, worst {side.worst_collision:.1f}x"


def _load(uplink: Uplink | None) -> str:
    if uplink is None:
        return "-"
    return size_text(uplink.num_bytes) + ("" if uplink.seconds is None else f", {time_text(uplink.seconds)}")


def _name(uplink: Uplink | None) -> str:
    return "-" if uplink is None else uplink.name


def _estimates(report: PlanReport) -> Section:
    stage, memory = report.fullest
    terms = sorted(memory.terms.items(), key=lambda term: -term[1])
    total = _memory(memory.total, report.gpu_memory_bytes)
    rows: list[tuple[str, ...]] = [(f"memory of a rank of stage {stage}", total)]
    rows += [(f"  {name}", size_text(num_bytes)) for name, num_bytes in terms if num_bytes * 20 > memory.total]
    estimate = report.estimate
    if report.mesh.pp > 1:
        rows.append(("pipeline bubble", f"{estimate.bubble:.1%}"))
    for axis, shares in (("dp", report.dp_hidden), ("pp", report.pp_hidden), ("tp", report.tp_hidden)):
        rows += [(f"{axis} hidden at best, at {ratio:g}x of compute", f"{share:.1%}") for ratio, share in shares]
    if estimate.step_time_s is not None and estimate.mfu is not None:
        rows += [("step time", time_text(estimate.step_time_s)), ("MFU", f"{estimate.mfu:.1%}")]
    rows += _checkpoint(report.checkpoint)
    return Section("Estimates", ("estimates", ""), tuple(rows))


def _checkpoint(flow: CheckpointFlow) -> list[tuple[str, ...]]:
    most = f"{size_text(flow.most_written)}, {flow.written_over_mean:.2f}x the mean"
    read = f"{flow.read_over_state:.2f}x of it, the busiest rank {flow.read_over_mean:.2f}x the mean"
    return [
        ("a checkpoint", f"{size_text(flow.num_bytes)}, by {flow.num_writers} ranks"),
        ("  the fullest writer", most),
        ("  read back from the store", read),
    ]


def _memory(num_bytes: int, gpu_memory_bytes: int | None) -> str:
    text = size_text(num_bytes)
    return text if gpu_memory_bytes is None else f"{text} of {size_text(gpu_memory_bytes)}"


def size_text(num_bytes: float) -> str:
    """12.3 GiB"""
    value, units = float(num_bytes), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    for unit in units:
        if value < 1024 or unit == units[-1]:
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def time_text(seconds: float) -> str:
    """31.4 ms"""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def table_text(section: Section) -> str:
    lines = [section.header, *section.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(section.header))]
    texts = []
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)),
        ]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)

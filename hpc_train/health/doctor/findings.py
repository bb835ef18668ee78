"""What the doctor says: one finding a fact, merged over hosts, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from hpc_train.cluster.hostlist import compress_hostlist

Level = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note", "ok")
AREAS = ("slurm", "mpi", "infiniband", "devices", "network", "limits", "storage", "modules", "python", "hdfs")
_MOST_TEXTS = 4
"""Texts of one kind that are printed; those of further hosts are counted (assumed: what a reader takes in)."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found. Only an error would stop a run.

    hosts: where; empty for what holds for the whole site. details: lines of a table that belongs to it.
    """

    id: str
    level: Level
    found: str
    cure: str = ""
    hosts: tuple[str, ...] = ()
    details: tuple[str, ...] = ()

    @property
    def area(self) -> str:
        return self.id.partition(".")[0]

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "area": self.area,
            "hosts": list(self.hosts),
            "hostlist": compress_hostlist(self.hosts) if self.hosts else "",
            "details": list(self.details),
        }

    @staticmethod
    def from_json(values: dict[str, Any]) -> Finding:
        return Finding(
            id=values["id"],
            level=values["level"],
            found=values["found"],
            cure=values["cure"],
            hosts=tuple(values["hosts"]),
            details=tuple(values["details"]),
        )


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Join equal findings of several hosts into one, and leave the order of the first ones."""
    merged: dict[Finding, list[str]] = {}
    for finding in findings:
        merged.setdefault(replace(finding, hosts=()), []).extend(finding.hosts)
    return [replace(finding, hosts=tuple(dict.fromkeys(hosts))) for finding, hosts in merged.items()]


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Areas by their worst finding, and within an area the worst first."""
    listed = list(findings)
    worst = {
        area: min((LEVELS.index(item.level) for item in listed if item.area == area), default=len(LEVELS))
        for area in AREAS
    }
    return sorted(listed, key=lambda item: (worst[item.area], AREAS.index(item.area), LEVELS.index(item.level)))


def would_stop_a_run(findings: Iterable[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


def format_report(findings: Sequence[Finding], num_hosts: int) -> str:
    """The findings as a table by area, worst first, with the cure below each.

    num_hosts: of how many hosts; where a finding holds for all of them they are not listed.
    """
    lines: list[str] = []
    area = ""
    for finding in worst_first(_shortened(findings)):
        if finding.area != area:
            area = finding.area
            lines += ["", area]
        where = f"[{compress_hostlist(finding.hosts)}] " if 0 < len(finding.hosts) < num_hosts else ""
        lines.append(f"  {finding.level:<8} {finding.id:<24} {where}{finding.found}")
        lines += [f"  {'':<8} {'':<24} {line}" for line in finding.details]
        if finding.cure:
            lines.append(f"  {'':<8} {'':<24} cure: {finding.cure}")
    return "\n".join([*lines, "", _summary(findings)])


def _shortened(findings: Sequence[Finding]) -> list[Finding]:
    """At most _MOST_TEXTS findings of one kind and level; the last one names the hosts of all others."""
    kinds: dict[tuple[str, Level], list[Finding]] = {}
    for finding in findings:
        kinds.setdefault((finding.id, finding.level), []).append(finding)
    shown = []
    for members in kinds.values():
        shown += members[:_MOST_TEXTS]
        if rest := members[_MOST_TEXTS:]:
            hosts = tuple(dict.fromkeys(host for member in rest for host in member.hosts))
            shown.append(replace(rest[0], found=f"{rest[0].found} (and {len(rest) - 1} alike)", hosts=hosts))
    return shown


def _summary(findings: Sequence[Finding]) -> str:
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    told = ", ".join(f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}" for level in LEVELS[:3])
    end = "a run would be stopped by the errors" if counts["error"] else "nothing here would stop a run"
    return f"{told}, {counts['ok']} ok: {end}."

"""How much of a step's time ranks wait for communication, by its kind.

docs/concepts/exposed-communication.md has the definition. A rank waits from `wait` to `end` of a row. While another
rank has not yet begun its own part, that is waiting for the rank; the rest is exposed communication. It counts in the
step in which the rank waits, whichever step the transfer was begun in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.observe.rank_trace import RankTrace
from hpc_train.observe.trace_files import rows_of, step_span
from hpc_train.record import Kind, Name, quotient

Key = tuple[str, str, int, int, int]
"""What the rows of one transfer have in common: group, operation, first or sending rank, receiver, ordinal."""


@dataclass
class Exposure:
    """Of one kind, summed over the chosen ranks and steps; times in ns.

    num: those that were awaited in these steps. num_matched: those whose other sides were all among the chosen ranks;
    where they were not, all waiting is exposed. num_from_before: those that were begun before the step.
    """

    label: str
    num: int = 0
    num_matched: int = 0
    num_from_before: int = 0
    num_bytes: int = 0
    in_flight_ns: int = 0
    late_ns: int = 0
    exposed_ns: int = 0


@dataclass(frozen=True)
class Exposures:
    """num_steps: steps of ranks, so 8 ranks x 20 steps are 160. step_ns: their times added."""

    kinds: tuple[Exposure, ...]
    num_steps: int
    step_ns: int

    def share(self, exposure: Exposure) -> float | None:
        """Of the steps' time; None where that is not known."""
        return quotient(exposure.exposed_ns, self.step_ns)


def key_of(name: Name, rank: int, peer: int, ordinal: int) -> Key | None:
    """What matches a row with those of other ranks; None for work that is a rank's own."""
    if name.kind is Kind.SEND:
        return (name.group, "p2p", rank, peer, ordinal)
    if name.kind is Kind.RECEIVE:
        return (name.group, "p2p", peer, rank, ordinal)
    if name.kind is Kind.COLLECTIVE:
        return (name.group, name.label, name.first_rank, -1, ordinal)
    return None


@dataclass(frozen=True)
class Sides:
    """Of each transfer how many of the chosen ranks have begun it, and when the last one did."""

    num_begun: dict[Key, int]
    last_begin: dict[Key, int]

    def late_ns(self, name: Name, key: Key, wait: int, end: int) -> tuple[bool, int]:
        """Whether all its sides are known; and how long of the wait some rank had not begun its own, 0 if not known."""
        if self.num_begun[key] != (name.group_size if name.kind is Kind.COLLECTIVE else 2):
            return False, 0
        return True, min(max(0, end - wait), max(0, self.last_begin[key] - wait))


def measure_exposure(traces: Sequence[RankTrace]) -> Exposures:
    """By kind, in the order of their exposed time, the longest first."""
    sides = find_sides(traces)
    found: dict[str, Exposure] = {}
    num_steps, step_ns = 0, 0
    for trace, _, rows in rows_of(traces):
        within = step_span(trace, rows)
        if within is None:
            continue
        num_steps += 1
        step_ns += max(0, within[1] - within[0])
        for name_id, begin, wait, end, _, _, peer, ordinal, num_bytes in rows.tolist():
            name = trace.names[name_id]
            key = key_of(name, trace.rank, peer, ordinal)
            if key is None or not within[0] <= wait <= within[1]:
                continue
            kind = found.setdefault(name.label, Exposure(name.label))
            kind.num += 1
            kind.num_from_before += begin < within[0]
            kind.num_bytes += num_bytes
            kind.in_flight_ns += max(0, end - begin)
            is_matched, late = sides.late_ns(name, key, wait, end)
            kind.num_matched += is_matched
            kind.late_ns += late
            kind.exposed_ns += max(0, end - wait) - late
    kinds = sorted(found.values(), key=lambda kind: (-kind.exposed_ns, kind.label))
    return Exposures(tuple(kinds), num_steps, step_ns)


def find_sides(traces: Sequence[RankTrace]) -> Sides:
    """Of the chosen steps' transfers, also of those that other ranks await a step before or behind."""
    sides = Sides(defaultdict(int), {})
    for trace, _, rows in rows_of(traces, beside=True):
        for name_id, begin, _, _, _, _, peer, ordinal, _ in rows.tolist():
            key = key_of(trace.names[name_id], trace.rank, peer, ordinal)
            if key is not None:
                sides.num_begun[key] += 1
                sides.last_begin[key] = max(begin, sides.last_begin.get(key, begin))
    return sides


def exposure_table(exposures: Exposures) -> str:
    """The figures as a table, per step and rank."""
    steps = exposures.num_steps
    head = ("communication", "number", "MB", "in flight ms", "peers late ms", "exposed ms", "share of step")
    lines: list[tuple[str, ...]] = [head]
    for kind in exposures.kinds:
        times = [_text(quotient(ns / 1e6, steps), ".3f") for ns in (kind.in_flight_ns, kind.late_ns, kind.exposed_ns)]
        number, megabytes = quotient(kind.num, steps), quotient(kind.num_bytes / 1e6, steps)
        lines.append(
            (kind.label, _text(number, ".1f"), _text(megabytes, ".3f"), *times, _text(exposures.share(kind), ".1%"))
        )
    total = sum(kind.exposed_ns for kind in exposures.kinds)
    share = _text(quotient(total, exposures.step_ns), ".1%")
    lines.append(("all", "", "", "", "", _text(quotient(total / 1e6, steps), ".3f"), share))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def exposure_figures(exposures: Exposures) -> dict[str, object]:
    """The same for strict JSON, null for what is not known."""
    steps = exposures.num_steps
    return {
        "steps_of_ranks": steps,
        "step_time_s": quotient(exposures.step_ns / 1e9, steps),
        "kinds": {
            kind.label: {
                "number": kind.num,
                "number_matched": kind.num_matched,
                "number_from_before": kind.num_from_before,
                "bytes": kind.num_bytes,
                "in_flight_s": kind.in_flight_ns / 1e9,
                "peers_late_s": kind.late_ns / 1e9,
                "exposed_s": kind.exposed_ns / 1e9,
                "bytes_per_s": quotient(kind.num_bytes, kind.in_flight_ns / 1e9),
                "share_of_step": exposures.share(kind),
            }
            for kind in exposures.kinds
        },
    }


def _text(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)

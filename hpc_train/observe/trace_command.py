"""`hpc-train trace RUN`: a timeline of chosen ranks and steps, and the exposed share of each kind of communication."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from hpc_train.errors import ConfigError, DataError
from hpc_train.log import say
from hpc_train.observe.chrome_trace import write_chrome_trace
from hpc_train.observe.exposed import exposure_figures, exposure_table, measure_exposure
from hpc_train.observe.rank_trace import RankTrace
from hpc_train.observe.timeline_picture import draw_timeline
from hpc_train.observe.trace_files import TraceFolder, choose_ranks, find_trace, parse_ranges, read_rank
from hpc_train.plan.out_file import check_out
from hpc_train.plan.run import ranges_text
from hpc_train.record import attempt_folder, attempts_in

# More than this in one file opens slowly or not at all in a browser (assumed; some 300 MB of JSON).
_MAX_ROWS = 1_500_000


def trace_command(args: argparse.Namespace) -> int:
    """Write the trace and print the table, or with --json the figures."""
    run_dir = Path(args.run)
    folder = find_trace(run_dir, args.attempt)
    steps = None if args.steps is None else _one_range(args.steps)
    out = Path(args.out) if args.out else run_dir / "trace.json.gz"
    check_out(out, "--out")
    if args.png:
        check_out(args.png, "--png")
    traces = _read(folder, choose_ranks(folder, args.ranks), steps)
    if args.png:
        draw_timeline(traces, Path(args.png), "--png")
    num_events = write_chrome_trace(out, traces, "--out")
    exposures = measure_exposure(traces)
    taken = sorted({step for trace in traces for step in trace.rows})
    notes = _notes(traces, sum(kind.num_from_before for kind in exposures.kinds))
    wanted = range(taken[0], taken[-1] + 1) if steps is None else steps
    if len(taken) < wanted.stop - wanted.start:
        notes.append(f"recorded of steps {wanted.start} to {wanted.stop - 1} are only {ranges_text(taken)}")
    if args.json:
        found = {"out": str(out), "events": num_events, "ranks": len(traces), "first_step": taken[0]}
        say(json.dumps({**found, "last_step": taken[-1], "notes": notes, **exposure_figures(exposures)}))
        return 0
    say(f"{len(traces)} ranks, steps {taken[0]} to {taken[-1]}; per rank and step:")
    say(exposure_table(exposures))
    for note in notes:
        say(f"note: {note}")
    if args.png:
        say(f"written: {args.png}")
    say(f"written: {out} ({num_events} events; open it in https://ui.perfetto.dev)")
    return 0


def _one_range(text: str) -> range:
    parts = parse_ranges(text, "--steps")
    if len(parts) != 1:
        raise ConfigError(f"--steps {text!r} is not one range; write for example 10-29.")
    return parts[0]


def _read(folder: TraceFolder, ranks: Sequence[int], steps: range | None) -> list[RankTrace]:
    """The ranks' rows, at most what a viewer opens.

    Raises:
        DataError: too many, or none.
    """
    traces: list[RankTrace] = []
    num_rows = 0
    for rank in ranks:
        traces.append(read_rank(folder, rank, steps))
        num_rows += sum(map(len, traces[-1].rows.values()))
        if num_rows > _MAX_ROWS:
            num_steps = max(len(trace.rows) for trace in traces)
            fitting = max(1, num_steps * _MAX_ROWS * len(traces) // (num_rows * len(ranks)))
            raise DataError(
                f"{len(ranks)} ranks x {num_steps} steps have more than the {_MAX_ROWS} segments that a viewer opens. "
                f"Choose some {fitting} steps by --steps, or fewer ranks by --ranks."
            )
    if not num_rows:
        chosen = "" if steps is None else f" in steps {steps.start} to {steps.stop - 1}"
        missing = "".join(f" {note}." for note in _missing(traces))
        raise DataError(
            f"the chosen ranks have recorded nothing{chosen} that can be read.{missing}{_steps_there(folder, traces)} "
            "See observe.trace_steps in the run's config."
        )
    return traces


def _steps_there(folder: TraceFolder, traces: Sequence[RankTrace]) -> str:
    """What can be chosen instead, as sentences; empty where there is nothing."""
    recorded = sorted(set().union(*(trace.recorded for trace in traces)))
    there = f" Recorded are steps {ranges_text(recorded)} ({folder.path})." if recorded else ""
    others = [number for number in attempts_in(folder.path.parent) if attempt_folder(number) != folder.path.name]
    return there + (f" Other attempts have their own: --attempt {', '.join(map(str, others))}." if others else "")


def _notes(traces: Sequence[RankTrace], num_from_before: int) -> list[str]:
    notes = _missing(traces)
    dropped = sum(trace.num_dropped for trace in traces)
    if dropped:
        notes.append(f"dropped {dropped} segments beyond observe.trace_max_segments or for a file system too slow")
    if num_from_before:
        notes.append(f"{num_from_before} transfers were begun before the step that awaits them, in which they count")
    unknown = [trace for trace in traces if trace.clock_error_ns is None]
    if unknown and len({trace.node for trace in traces}) > 1:
        ranks = ranges_text([trace.rank for trace in unknown])
        notes.append(f"ranks {ranks} are on clocks whose offsets are not known: compare no times across nodes")
    error_ns = max(trace.clock_error_ns or 0 for trace in traces)
    if error_ns:
        notes.append(f"clocks of nodes agreed to {error_ns / 1000:.1f} us when the run started")
    return notes


def _missing(traces: Sequence[RankTrace]) -> list[str]:
    """What the files of ranks lack, those that lack the same together."""
    by_words: dict[str, list[int]] = {}
    for trace in traces:
        if trace.missing:
            by_words.setdefault(trace.missing, []).append(trace.rank)
    return [f"rank{'s' * (len(ranks) > 1)} {ranges_text(ranks)}: {words}" for words, ranks in by_words.items()]

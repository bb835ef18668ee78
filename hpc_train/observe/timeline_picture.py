"""The timeline as a picture: what each rank worked on, what was under way beside it, and where it waited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from hpc_train.errors import ConfigError, DataError
from hpc_train.observe.exposed import find_sides, key_of
from hpc_train.observe.rank_trace import RankTrace
from hpc_train.observe.trace_files import awaited_elsewhere, chosen_span, rows_of, step_span
from hpc_train.plan.out_file import open_out
from hpc_train.record import Kind

MAX_RANKS = 64
"""More rows than these are too thin to read (assumed)."""
_MAX_SEGMENTS = 50_000

# Of work by its label and of the rest by its kind; told apart in grey too. Others are numbered through _FURTHER.
_COLOURS = {
    "forward": "#9ecae1", "backward": "#3182bd", "backward of weights": "#08519c", "optimizer": "#756bb1",
    "data": "#fdae6b", "save": "#e6550d",
}  # fmt: skip
_FURTHER = ("#a1d99b", "#31a354", "#bcbddc", "#969696", "#d9b38c", "#8c6d31")
_UNDER_WAY, LATE, EXPOSED, _IDLE = "#c7c7c7", "#fee391", "#d62728", "#ffffff"
_OF_WAITS = {"under way": _UNDER_WAY, "waited: peers late": LATE, "waited: exposed": EXPOSED}

# In inches; a picture of the most ranks is made less tall than these would have it.
_WIDTH, _WORK, _LANE, _GAP, _MOST_TALL = 12.0, 0.26, 0.13, 0.16, 40.0
_ENTRIES_A_ROW, _ROW = 5, 0.2
"""Of the legend: so many of the longest names have room beside each other."""

Spans = dict[str, list[tuple[float, float]]]
"""By colour: begins and widths in ms."""


@dataclass
class RankBars:
    """What one rank's rows show. lanes: by the label of its communication."""

    work: Spans = field(default_factory=dict)
    lanes: dict[str, Spans] = field(default_factory=dict)


def draw_timeline(traces: Sequence[RankTrace], path: Path, option: str) -> None:
    """Of each rank its work, blank where it waits; below, a lane for each kind of communication: when it was under way,
    and the parts that the rank waited for, by what it waited for.

    The picture has the chosen steps, from the first one's begin to the last one's end; what is under way across these
    goes to the edge.

    Raises:
        DataError: so many ranks or segments that nothing could be seen.
        ConfigError: matplotlib is not installed, or has no such kind of file; it cannot be written, or must not be.
            option: where the user named it.
    """
    _check_amount(traces)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed: pip install 'hpc_train[report]'"
        ) from error
    begin, end = _span(traces)
    bars, labels, kinds = timeline_bars(traces, begin)
    pitch = _WORK + _LANE * len(kinds) + _GAP
    entries = {**labels, **_OF_WAITS}
    margins = 0.7 + _ROW * -(-len(entries) // _ENTRIES_A_ROW)
    figure = Figure(figsize=(_WIDTH, min(_MOST_TALL, margins + pitch * len(traces))), layout="constrained")
    files = FigureCanvasAgg(figure).get_supported_filetypes()
    kind_of_file = path.suffix.removeprefix(".").lower()
    if kind_of_file not in files:
        raise ConfigError(f"{path} does not end like a picture: give a name that ends in .png (or {', '.join(files)}).")
    axes = figure.add_subplot()
    ticks = []
    for index, (trace, of_rank) in enumerate(zip(traces, bars, strict=True)):
        top = index * pitch
        ticks.append((top + _WORK / 2, f"rank {trace.rank}  {trace.node}", 10))
        _draw(axes, of_rank.work, top, _WORK)
        for lane, kind in enumerate(kinds):
            y = top + _WORK + lane * _LANE
            ticks.append((y + _LANE / 2, kind, 6))
            _draw(axes, of_rank.lanes.get(kind, {}), y, _LANE)
    axes.set_yticks([y for y, _, _ in ticks], [text for _, text, _ in ticks])
    for tick, (_, _, size) in zip(axes.get_yticklabels(), ticks, strict=True):
        tick.set_fontsize(size)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(pitch * len(traces) - _GAP / 2, -_GAP / 2)
    axes.set_xlim(0, max(1e-6, (end - begin) / 1e6))
    axes.set_xlabel(f"ms from the beginning of step {min(step for trace in traces for step in trace.rows)}")
    axes.spines[["top", "right"]].set_visible(False)
    for at in _later_begins(traces, begin):
        axes.axvline(at, color="black", lw=0.6, ls=":")
    handles = [Patch(color=colour, label=label) for label, colour in entries.items()]
    axes.legend(handles=handles, frameon=False, ncols=_ENTRIES_A_ROW, loc="lower left", bbox_to_anchor=(0, 1))
    picture = BytesIO()
    figure.savefig(picture, dpi=120, format=kind_of_file)
    with open_out(path, option) as file:
        file.write(picture.getbuffer())


def _check_amount(traces: Sequence[RankTrace]) -> None:
    if len(traces) > MAX_RANKS:
        raise DataError(f"{len(traces)} ranks do not fit on a picture; choose {MAX_RANKS} at most by --ranks")
    num_segments = sum(len(rows) for _, _, rows in rows_of(traces))
    if num_segments > _MAX_SEGMENTS:
        raise DataError(
            f"{num_segments} segments do not fit on a picture of {_MAX_SEGMENTS}; choose fewer steps by --steps"
        )


def _draw(axes: Any, spans: Spans, y: float, height: float) -> None:
    """Later colours lie above earlier ones."""
    for colour, pieces in spans.items():
        edge = {"edgecolors": "none"} if colour == _IDLE else {"edgecolors": "white", "linewidth": 0.2}
        axes.broken_barh(pieces, (y, height), facecolors=colour, **edge)


def _span(traces: Sequence[RankTrace]) -> tuple[int, int]:
    """Of the chosen steps over all ranks; of all that there is, where no step has ended."""
    spans = [span for trace in traces if (span := chosen_span(trace)) is not None]
    if not spans:
        spans = [(int(rows[:, 1].min()), int(rows[:, 3].max())) for _, _, rows in rows_of(traces)]
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def _later_begins(traces: Sequence[RankTrace], start: int) -> list[float]:
    """When each chosen step but the first begins on the first rank that takes it, in ms."""
    begins: dict[int, int] = {}
    for trace, step, rows in rows_of(traces):
        if (span := step_span(trace, rows)) is not None:
            begins[step] = min(span[0], begins.get(step, span[0]))
    return [(begins[step] - start) / 1e6 for step in sorted(begins)[1:]]


def timeline_bars(traces: Sequence[RankTrace], start: int) -> tuple[list[RankBars], dict[str, str], list[str]]:
    """The bars of each rank; the colour of each label of work that occurs; the labels of communication, in order.

    start: the moment that is 0 ms. Waits between steps are in no figures, and so are only shown as under way.
    """
    sides = find_sides(traces)
    labels: dict[str, str] = {}
    bars = []

    def add(spans: Spans, colour: str, begin: int, end: int) -> None:
        if end > begin:
            spans.setdefault(colour, []).append(((begin - start) / 1e6, (end - begin) / 1e6))

    for trace in traces:
        of_rank, waits = RankBars(), []
        rows = [(step_span(trace, of_step), row) for of_step in trace.rows.values() for row in of_step.tolist()]
        for within, (name_id, begin, wait, end, _, _, peer, ordinal, _) in rows:
            name = trace.names[name_id]
            key = key_of(name, trace.rank, peer, ordinal)
            if key is not None:
                lane = of_rank.lanes.setdefault(name.label, _empty_lane())
                add(lane, _UNDER_WAY, begin, end)
                waits.append((wait, end))
                if within is None or within[0] <= wait <= within[1]:
                    late = sides.late_ns(name, key, wait, end)[1]
                    add(lane, LATE, wait, wait + late)
                    add(lane, EXPOSED, wait + late, end)
            elif name.kind is not Kind.STEP:
                colour = labels.get(name.label) or _COLOURS.get(name.label)
                labels[name.label] = colour or _FURTHER[len(labels) % len(_FURTHER)]
                add(of_rank.work, labels[name.label], begin, end)
        for _, (name_id, begin, _, end, *_) in awaited_elsewhere(trace):
            add(of_rank.lanes.setdefault(trace.names[name_id].label, _empty_lane()), _UNDER_WAY, begin, end)
        for wait, end in waits:
            add(of_rank.work, _IDLE, wait, end)
        bars.append(of_rank)
    return bars, labels, sorted({label for of_rank in bars for label in of_rank.lanes})


def _empty_lane() -> Spans:
    return {colour: [] for colour in _OF_WAITS.values()}

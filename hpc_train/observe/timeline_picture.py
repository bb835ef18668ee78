"""The timeline as a picture: what each rank worked on, what was under way beside it, and where it waited."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_train.errors import ConfigError, DataError
from hpc_train.observe.rank_trace import RankTrace
from hpc_train.observe.trace_files import awaited_elsewhere, chosen_span, rows_of
from hpc_train.record import COMMUNICATION, Kind

MAX_RANKS = 64
"""More rows than these are too thin to read (assumed)."""
_MAX_SEGMENTS = 50_000

# Of work by its label and of the rest by its kind; told apart in grey too. Others are numbered through _FURTHER.
_COLOURS = {
    "forward": "#9ecae1", "backward": "#3182bd", "backward of weights": "#08519c", "optimizer": "#756bb1",
    "data": "#fdae6b", "save": "#e6550d",
}  # fmt: skip
_FURTHER = ("#a1d99b", "#31a354", "#bcbddc", "#969696", "#d9b38c", "#8c6d31")
_UNDER_WAY, _WAITED = "#c7c7c7", "#d62728"

Bars = dict[tuple[float, str], list[tuple[float, float]]]
"""By height and colour of a bar: its begins and widths in ms."""


def draw_timeline(traces: Sequence[RankTrace], path: Path) -> None:
    """Two rows a rank: its work above, communication below, with a red part where the rank waited for it.

    The picture has the chosen steps, from the first one's begin to the last one's end; what is under way across these
    goes to the edge.

    Raises:
        DataError: so many ranks or segments that nothing could be seen.
        ConfigError: matplotlib is not installed, or has no such kind of file.
        OSError: it cannot be written.
    """
    if len(traces) > MAX_RANKS:
        raise DataError(f"{len(traces)} ranks do not fit on a picture; choose {MAX_RANKS} at most by --ranks")
    num_segments = sum(len(rows) for _, _, rows in rows_of(traces))
    if num_segments > _MAX_SEGMENTS:
        raise DataError(
            f"{num_segments} segments do not fit on a picture of {_MAX_SEGMENTS}; choose fewer steps by --steps"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed: pip install 'hpc_train[report]'"
        ) from error
    bars, labels = _bars(traces)
    figure = Figure(figsize=(12, 1.4 + 0.5 * len(traces)), layout="constrained")
    kinds = FigureCanvasAgg(figure).get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise ConfigError(f"{path} does not end like a picture: give a name that ends in .png (or {', '.join(kinds)}).")
    axes = figure.add_subplot()
    for (y, colour), spans in bars.items():
        axes.broken_barh(spans, (y, 0.4), facecolors=colour, edgecolors="white", linewidth=0.2)
    axes.set_yticks(range(len(traces)), [f"rank {trace.rank}  {trace.node}" for trace in traces])
    axes.set_ylim(len(traces) - 0.4, -0.6)
    begin, end = _span(traces)
    axes.set_xlim(0, max(1e-6, (end - begin) / 1e6))
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    named = {**labels, "communication under way": _UNDER_WAY, "waited for it": _WAITED}
    handles = [Patch(color=colour, label=label) for label, colour in named.items()]
    axes.legend(handles=handles, frameon=False, ncols=min(8, len(handles)), loc="lower left", bbox_to_anchor=(0, 1))
    figure.savefig(path, dpi=120)


def _span(traces: Sequence[RankTrace]) -> tuple[int, int]:
    """Of the chosen steps over all ranks; of all that there is, where no step has ended."""
    spans = [span for trace in traces if (span := chosen_span(trace)) is not None]
    if not spans:
        spans = [(int(rows[:, 1].min()), int(rows[:, 3].max())) for _, _, rows in rows_of(traces)]
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def _bars(traces: Sequence[RankTrace]) -> tuple[Bars, dict[str, str]]:
    """The bars, and the colour of each label of work that occurs."""
    start, _ = _span(traces)
    bars: Bars = {}
    labels: dict[str, str] = {}

    def add(y: float, colour: str, begin: int, end: int) -> None:
        bars.setdefault((y, colour), []).append(((begin - start) / 1e6, max(0, end - begin) / 1e6))

    for index, trace in enumerate(traces):
        for rows in trace.rows.values():
            for name_id, begin, wait, end, *_ in rows.tolist():
                name = trace.names[name_id]
                if name.kind in COMMUNICATION:
                    add(index, _UNDER_WAY, begin, end)
                    add(index, _WAITED, wait, end)
                elif name.kind is not Kind.STEP:
                    colour = labels.get(name.label) or _COLOURS.get(name.label)
                    labels[name.label] = colour or _FURTHER[len(labels) % len(_FURTHER)]
                    add(index - 0.4, labels[name.label], begin, end)
        for _, (_, begin, _, end, *_) in awaited_elsewhere(trace):
            add(index, _UNDER_WAY, begin, end)
    # The waited parts lie above what was under way.
    return dict(sorted(bars.items(), key=lambda item: item[0][1] == _WAITED)), labels

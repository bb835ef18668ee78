"""`hpc-train report RUN`: a table of the figures that matter, and the loss curve as a picture."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from io import BytesIO
from pathlib import Path

from hpc_train.errors import ConfigError
from hpc_train.log import say
from hpc_train.observe.run_record import RunRecord, Summary, has_loss, read_run, summarise
from hpc_train.plan.out_file import check_out, open_out, write_out

REPORT_FILE = "report.md"
FIGURES_FILE = "report.json"
CURVE_FILE = "loss.png"


def report_command(args: argparse.Namespace) -> int:
    """Write report.md, report.json and loss.png into the run folder, or into --out, and print the table."""
    run = read_run(Path(args.run))
    out = Path(args.out) if args.out else run.run_dir
    summary = summarise(run)
    figures = {**asdict(summary), "gain_nats": summary.gain_nats}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {out}: {error.strerror or error}. Give another folder by --out"
        ) from error
    for name in (CURVE_FILE, FIGURES_FILE, REPORT_FILE):
        check_out(out / name, "--out")
    draw_loss(run, summary, out / CURVE_FILE)
    write_out(out / FIGURES_FILE, "--out", json.dumps(figures, indent=1) + "\n")
    write_out(out / REPORT_FILE, "--out", report_text(summary))
    if getattr(args, "json", False):
        say(json.dumps(figures))
        return 0
    say(report_text(summary))
    say(f"written: {out / REPORT_FILE}, {out / FIGURES_FILE}, {out / CURVE_FILE}")
    return 0


def report_text(summary: Summary) -> str:
    """The report as Markdown that also reads well in a terminal."""
    rows = [
        ("ranks", _text(summary.ranks, "d")),
        ("steps", f"{summary.steps} of {_text(summary.steps_planned, 'd')}, {summary.skipped_steps} skipped"),
        ("tokens", _text(summary.tokens, ",d")),
        ("step time, median", _text(summary.step_time_s, ".3f", " s")),
        ("tokens/s, median", _text(summary.tokens_per_s, ",.0f")),
        ("MFU, median", _mfu(summary)),
        ("training loss, first -> last", f"{_text(summary.first_loss, '.3f')} -> {_text(summary.last_loss, '.3f')}"),
        ("held-out loss", _text(summary.heldout_loss, ".3f", " nats")),
        ("unigram entropy of the corpus", _text(summary.unigram_entropy_nats, ".3f", " nats")),
        ("held-out loss is below it by", _text(summary.gain_nats, ".3f", " nats")),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"| {name.ljust(width)} | {value.rjust(24)} |" for name, value in rows]
    rule = f"|{'-' * (width + 2)}|{'-' * 25}:|"
    head = f"| {'figure'.ljust(width)} | {'value'.rjust(24)} |"
    notes = [f"note: {note}" for note in summary.notes]
    return "\n".join([f"# {summary.name}", "", head, rule, *lines, "", *notes, f"![loss]({CURVE_FILE})", ""])


def draw_loss(run: RunRecord, summary: Summary, path: Path) -> None:
    """The training loss of each step, the held-out losses, and the unigram entropy as a line to beat.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a report needs matplotlib, which is not installed: pip install 'hpc_train[report]'"
        ) from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    taken = [record for record in run.steps if has_loss(record) and not record.get("skipped")]
    axes.plot([r["step"] for r in taken], [r["loss"] for r in taken], color="#9ab8d3", lw=1.2, label="training loss")
    heldout = [record for record in run.steps if record.get("eval_loss") is not None]
    if heldout:
        x, y = [r["step"] for r in heldout], [r["eval_loss"] for r in heldout]
        axes.plot(x, y, color="#1f4e79", lw=2, marker="o", ms=4, label="held-out loss")
        axes.annotate(f"{y[-1]:.2f}", (x[-1], y[-1]), textcoords="offset points", xytext=(0, -14), ha="center")
    if summary.unigram_entropy_nats is not None:
        label = f"unigram entropy of the corpus, {summary.unigram_entropy_nats:.2f}"
        axes.axhline(summary.unigram_entropy_nats, color="#b5482a", ls="--", lw=1.2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.set_title(f"{summary.name}: {summary.tokens:,} tokens on {summary.ranks or '?'} ranks")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    picture = BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    with open_out(path, "--out") as file:
        file.write(picture.getbuffer())


def _mfu(summary: Summary) -> str:
    if summary.mfu is None or summary.peak_flops is None:
        return "n/a, no peak is known"
    return f"{summary.mfu:.1%} of {summary.peak_flops / 1e9:,.0f} GFLOP/s"


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "n/a" if value is None else format(value, form) + unit

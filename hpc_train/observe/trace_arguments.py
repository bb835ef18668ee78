"""The arguments of `hpc-train trace`."""

from __future__ import annotations

import argparse
from typing import Any

from hpc_train.arguments import add_run, filled


def add_trace_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "trace",
        help="timeline of chosen ranks and steps for Perfetto, and how much communication is exposed",
        description="Merge what ranks recorded into one Chrome trace, which https://ui.perfetto.dev opens, and print "
        "which share of the steps' time is exposed communication, by its kind.",
        allow_abbrev=False,
    )
    add_run(parser)
    parser.add_argument("--ranks", type=filled, metavar="R", help="such as 0-3,8 (default: all)")
    parser.add_argument(
        "--steps", type=filled, metavar="A-B", help="first and last step (default: all that were recorded)"
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="which start of the run (default: the last)")
    parser.add_argument("--out", type=filled, metavar="FILE", help="where to write (default: RUN/trace.json.gz)")
    parser.add_argument(
        "--png", type=filled, metavar="FILE", help="also draw the timeline; of few steps, or little can be seen"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of the table")

"""`hpc-train plan --batch STEP`: who does what in a step of hybrid data parallelism, before anything is started."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_train import log
from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.fabric_find import FoundFabric
from hpc_train.config import Config
from hpc_train.errors import ConfigError
from hpc_train.plan.axis_bytes import axis_traffic
from hpc_train.plan.batch_page import batch_page_html
from hpc_train.plan.batch_places import hdp_figures
from hpc_train.plan.batch_profile import profile_of
from hpc_train.plan.batch_report import BatchReport, batch_json, batch_text, report_batch
from hpc_train.plan.out_file import write_out
from hpc_train.plan.place import place
from hpc_train.plan.run import world_mesh

Tell = Callable[[int], None]
"""Called with each step that is counted through."""
LengthsOf = Callable[[Config, int, Tell], Sequence[int]]
"""Tokens of each sequence of a step."""
_TOLD_EVERY_S = 5.0


def batch_command(
    options: Namespace,
    config: Config,
    order: str | None,
    allocation: Allocation,
    found: FoundFabric,
    lengths_of: LengthsOf,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Carry out `plan --batch`.

    lengths_of: tokens of each sequence of a step of a run, which its datasets' indices tell.

    Raises:
        ConfigError: the run has no parallel.hdp, not so many steps, or a step that its ranks cannot hold.
        DataError: the datasets cannot be used.
    """
    if options.batch > config.train.steps:
        raise ConfigError(
            f"--batch {options.batch}: the run has steps 1 to {config.train.steps} (train.steps). Give one of them, or "
            f"plan a longer run by train.steps={options.batch}"
        )
    report = _report(options.batch, config, order, allocation, found, lengths_of, clock)
    if options.html:
        write_page(Path(options.html), batch_page_html(report))
    if options.json:
        print(json.dumps(batch_json(report), allow_nan=False))
        for note in report.notes:
            log.say(f"note: {note}", sys.stderr)
    else:
        print(batch_text(report), end="")
    return 0


def _report(
    step: int,
    config: Config,
    order: str | None,
    allocation: Allocation,
    found: FoundFabric,
    lengths_of: LengthsOf,
    clock: Callable[[], float],
) -> BatchReport:
    mesh, fabric = world_mesh(config, allocation), found.fabric
    placement = place(mesh, allocation, fabric, axis_traffic(config, mesh), order or config.fabric.order)
    figures = hdp_figures(placement, fabric)
    profile = profile_of(config, mesh, figures["link_bytes_per_s"])
    places = (figures["order"], figures["host"], figures["port"])
    lengths = lengths_of(config, step, _teller(step, clock))
    report = report_batch(config, mesh, step, lengths, profile, figures["nodes"], places)
    # Once more for the time: the first plan of a process loads or compiles its loops.
    begin = clock()
    again = report.setup.plan(step, report.lengths.tolist())
    seconds = clock() - begin
    assert again.digest == report.planned.table.digest
    notes = tuple(note for note in (*found.notes, *report.notes) if not note.startswith("fabric from "))
    if fabric is None:
        notes += ("rings go by rank number, since no topology is known",)
    return replace(report, planning_s=seconds, notes=notes)


def _teller(last: int, clock: Callable[[], float]) -> Tell:
    """Says now and then how far counting through the steps is."""
    begin = told_at = clock()

    def tell(step: int) -> None:
        nonlocal told_at
        now = clock()
        if now - told_at >= _TOLD_EVERY_S:
            told_at = now
            left_s = (now - begin) / step * (last - step)
            log.say(f"counted through step {step} of {last}, {left_s:.0f} s left", sys.stderr)

    return tell


def write_page(path: Path, text: str) -> None:
    """Write a page and say so.

    Raises:
        ConfigError: it cannot be written, or must not be.
    """
    write_out(path, "--html", text)
    log.say(f"written: {path}", sys.stderr)

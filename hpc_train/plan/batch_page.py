"""One self-contained HTML page that draws what each hdp rank does in a step: no network, no other file.

Times are whole nanoseconds and the ranks of rings runs of neighbours: a page of 4,096 ranks has less than a megabyte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_train.plan.batch_report import BatchReport, PlannedBatch, batch_sections
from hpc_train.plan.page_frame import framed_page


def batch_page_html(report: BatchReport) -> str:
    """The page of a report, with its tables beside the drawing."""
    nodes = list(dict.fromkeys(report.nodes))
    index = {node: number for number, node in enumerate(nodes)}
    data = {
        "title": report.title,
        "numRanks": report.planned.table.num_ranks,
        "order": report.setup.ranks.order.tolist(),
        "nodes": nodes,
        "nodeOfRank": [index[node] for node in report.nodes],
        "least": _nanoseconds(report, report.least),
        "plans": [_plan(report, one) for one in report.plans],
    }
    return framed_page("batch_page", report.title, data, batch_sections(report), report.notes)


def _plan(report: BatchReport, one: PlannedBatch) -> dict[str, Any]:
    table, spans = one.table, one.spans
    lengths = report.lengths[table.sequences].tolist()
    ranks = table.ranks.tolist()
    first_sequence, first_rank = table.first_sequence.tolist(), table.first_rank.tolist()
    return {
        "name": one.name,
        "end": _nanoseconds(report, one.times.makespan),
        "packs": [
            [
                _nanoseconds(report, int(spans.begins[pack])),
                _nanoseconds(report, int(spans.ends[pack])),
                int(table.offload_milli[pack]),
                lengths[first_sequence[pack] : first_sequence[pack + 1]],
                _runs(ranks[first_rank[pack] : first_rank[pack + 1]]),
            ]
            for pack in range(table.num_packs)
        ],
    }


def _runs(ranks: Sequence[int]) -> list[int]:
    """First rank and number of each run of neighbours, in the ring's order."""
    runs: list[int] = []
    for rank in ranks:
        if runs and rank == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += [rank, 1]
    return runs


def _nanoseconds(report: BatchReport, ticks: int) -> int:
    return round(report.seconds(ticks) * 1e9)

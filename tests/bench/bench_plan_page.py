"""How long the page of a plan takes to write, to load and to answer the mouse, at 64 and at 16,384 ranks.

    python -m tests.bench.bench_plan_page

Prints JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from hpc_train.plan.page import page_html
from tests.bench.browser import find_browser, time_page
from tests.plan.reports import make_config, make_report

_ACTIONS = """
const step = Math.max(1, Math.floor(numRanks / 200));
for (let rank = 0; rank < numRanks; rank += step) hovers.push(timed(() => show(rank, false)));
for (let turn = 0; turn < 20; turn++) draws.push(timed(() => { view.x += 1; redraw(); }));"""
SIZES = {
    64: ("clos:pods=2,nodes=8,ports=8,shuffle=1", {"pp": 2, "tp": 8}),
    16384: ("clos:pods=8,nodes=512,shuffle=1", {"pp": 8, "tp": 8}),
}


def main() -> int:
    browser = find_browser()
    if browser is None:
        print("no chromium on PATH", file=sys.stderr)
        return 1
    figures = {str(ranks): _measure(browser, ranks) for ranks in SIZES}
    few, many = figures.values()
    figures["ratio"] = {name: round(many[name] / few[name], 1) for name in few}
    print(json.dumps(figures, indent=1))
    return 0


def _measure(browser: str, ranks: int) -> dict[str, Any]:
    clos, parallel = SIZES[ranks]
    report = make_report(clos, ranks // 8, make_config(parallel, train={"steps": 1, "global_batch_size": 4096}))
    begin = time.perf_counter()
    page = page_html(report)
    write_s = time.perf_counter() - begin
    written = {"page_bytes": len(page), "write_ms": round(1000 * write_s, 1)}
    return {**written, **time_page(browser, page, _ACTIONS)}


if __name__ == "__main__":
    sys.exit(main())

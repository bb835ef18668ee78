"""How long `hpc-train plan --batch` takes at 4,096 hdp ranks: planning, the report, the page, also in a browser.

    python -m tests.bench.bench_batch_page [--ranks 4096] [--html OUT]

A step of the planner benchmark's lengths (32M tokens with a long tail) on hdp ranks of 4 GPUs, against rings of one
size. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from hpc_train.config_read import load_config
from hpc_train.plan.batch_page import batch_page_html
from hpc_train.plan.batch_profile import derived_profile
from hpc_train.plan.batch_report import batch_json, batch_text, report_batch
from hpc_train.plan.mesh import Mesh
from tests.bench.browser import find_browser, time_page
from tests.bench.hdp_lengths import tailed_lengths

_ACTIONS = """
for (let turn = 0; turn < 100; turn++) {
  hovers.push(timed(() => show(packAt(100 + turn * 5, 40 + turn * 6), false)));
}
for (let turn = 0; turn < 20; turn++) draws.push(timed(() => { view.row += 1; redraw(); }));"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--html")
    arguments = parser.parse_args()
    config = load_config("llama-7b-2m", ["parallel.tp=4"])
    mesh = Mesh(pp=1, dp=arguments.ranks, cp=1, tp=4)
    nodes = [f"n{rank // 2:04}" for rank in range(arguments.ranks)]
    lengths, profile = tailed_lengths(0).tolist(), derived_profile(config, mesh)
    report = report_batch(config, mesh, 1, lengths, profile, nodes)
    times: dict[str, Any] = {}

    def timed(name: str, action: Any) -> Any:
        begin = time.perf_counter()
        result = action()
        times[f"{name}_ms"] = round(1000 * (time.perf_counter() - begin), 1)
        return result

    timed("plan", lambda: report.setup.plan(1, lengths))
    timed("report", lambda: report_batch(config, mesh, 1, lengths, profile, nodes))
    timed("text", lambda: batch_text(report))
    timed("json", lambda: json.dumps(batch_json(report)))
    page = timed("page", lambda: batch_page_html(report))
    if arguments.html:
        Path(arguments.html).write_text(page)
    found = {"hdp_ranks": arguments.ranks, "sequences": len(lengths), **times, "page_bytes": len(page)}
    browser = find_browser()
    print(json.dumps({**found, **(time_page(browser, page, _ACTIONS) if browser else {})}, indent=1))


if __name__ == "__main__":
    main()

"""How long `hpc-train plan --batch` takes at 4,096 hdp ranks: planning, the report, the page, also in a browser.

    python -m tests.bench.bench_batch_page [--ranks 4096] [--html OUT]

A step of the planner benchmark's lengths (32M tokens with a long tail) on hdp ranks of 4 GPUs, against rings of one
size. Prints JSON. The browser is headless Chromium without a GPU; each drawing is read back, so that its work is in the
time.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from hpc_train.config import load_config
from hpc_train.plan.batch_page import batch_page_html
from hpc_train.plan.batch_profile import derived_profile
from hpc_train.plan.batch_report import batch_json, batch_text, report_batch
from hpc_train.plan.mesh import Mesh
from tests.bench.hdp_lengths import tailed_lengths

_MEASURE = """<script>
function timed(action) {
  const begin = performance.now();
  action();
  for (const canvas of [base, overlay]) canvas.getContext("2d").getImageData(0, 0, 1, 1);
  return performance.now() - begin;
}
const hovers = [], draws = [];
for (let turn = 0; turn < 100; turn++) {
  hovers.push(timed(() => show(packAt(100 + turn * 5, 40 + turn * 6), false)));
}
for (let turn = 0; turn < 20; turn++) draws.push(timed(() => { view.row += 1; redraw(); }));
document.body.dataset.answer = JSON.stringify({ hovers, draws });
</script>"""


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
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    print(json.dumps({**found, **(_in_browser(browser, page) if browser else {})}, indent=1))


def _in_browser(browser: str, page: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.html")
        path.write_text(page.replace("</body>", _MEASURE + "</body>"))
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1600,900"]
        command += [f"--user-data-dir={folder}/profile", "--dump-dom", f"file://{path}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    body = re.search(r"<body[^>]*>", done.stdout)
    assert body is not None
    load = re.search(r'data-load-ms="([^"]*)"', body[0])
    answer = re.search(r'data-answer="([^"]*)"', body[0])
    assert load is not None and answer is not None, body[0]
    measured = json.loads(answer[1].replace("&quot;", '"'))
    return {
        "load_ms": float(load[1]),
        "hover_ms_median": round(statistics.median(measured["hovers"]), 2),
        "redraw_ms_median": round(statistics.median(measured["draws"]), 2),
    }


if __name__ == "__main__":
    main()

"""How long the page of a plan takes to write, to load and to answer the mouse, at 64 and at 16,384 ranks.

    python -m tests.bench.bench_plan_page

Prints JSON. The browser is headless Chromium without a GPU; each drawing is read back, so that its work is in the time.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hpc_train.plan.page import page_html
from tests.plan.reports import make_config, make_report

_MEASURE = """<script>
function timed(action) {
  const begin = performance.now();
  action();
  for (const canvas of [base, overlay]) canvas.getContext("2d").getImageData(0, 0, 1, 1);
  return performance.now() - begin;
}
const step = Math.max(1, Math.floor(numRanks / 200));
const hovers = [], draws = [];
for (let rank = 0; rank < numRanks; rank += step) hovers.push(timed(() => show(rank, false)));
for (let turn = 0; turn < 20; turn++) draws.push(timed(() => { view.x += 1; redraw(); }));
document.body.dataset.answer = JSON.stringify({ hovers, draws });
</script>"""
SIZES = {
    64: ("clos:pods=2,nodes=8,ports=8,shuffle=1", {"pp": 2, "tp": 8}),
    16384: ("clos:pods=8,nodes=512,shuffle=1", {"pp": 8, "tp": 8}),
}


def main() -> int:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.html")
        path.write_text(page.replace("</body>", _MEASURE + "</body>"))
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1600,900"]
        command += [f"--user-data-dir={folder}/profile", "--dump-dom", f"file://{path}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    body = re.search(r"<body[^>]*>", done.stdout)
    assert body is not None
    load = re.search(r'data-load-ms="([^"]*)"', body[0])
    answer = re.search(r'data-answer="([^"]*)"', body[0])
    assert load is not None and answer is not None, body[0]
    times = json.loads(answer[1].replace("&quot;", '"'))
    return {
        "page_bytes": len(page),
        "write_ms": round(1000 * write_s, 1),
        "load_ms": float(load[1]),
        "hover_ms_median": round(statistics.median(times["hovers"]), 2),
        "hover_ms_worst": round(max(times["hovers"]), 2),
        "redraw_ms_median": round(statistics.median(times["draws"]), 2),
    }


if __name__ == "__main__":
    sys.exit(main())

"""Time a page in headless Chromium without a GPU; each drawing is read back, so that its work is in the time."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

_MEASURE = """<script>
function timed(action) {
  const begin = performance.now();
  action();
  for (const canvas of [base, overlay]) canvas.getContext("2d").getImageData(0, 0, 1, 1);
  return performance.now() - begin;
}
const hovers = [], draws = [];
@ACTIONS@
document.body.dataset.answer = JSON.stringify({ hovers, draws });
</script>"""


def find_browser() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


def time_page(browser: str, page: str, actions: str) -> dict[str, float]:
    """Milliseconds of loading a page, and of what `actions` puts into `hovers` and `draws` by `timed`."""
    measure = _MEASURE.replace("@ACTIONS@", actions)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        path.write_text(page.replace("</body>", measure + "</body>"))
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
        "load_ms": float(load[1]),
        "hover_ms_median": round(statistics.median(times["hovers"]), 2),
        "hover_ms_worst": round(max(times["hovers"]), 2),
        "redraw_ms_median": round(statistics.median(times["draws"]), 2),
    }

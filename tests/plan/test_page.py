"""The page that draws a plan: what is in it, and what its script works out in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cluster.fabric import Fabric, FabricNode
from hpc_train.plan.drawing import NO_LINK, draw_fabric
from hpc_train.plan.mesh import AXES
from hpc_train.plan.page import page_html
from tests.plan.allocations import place_of
from tests.plan.reports import make_config, make_report


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_page_needs_no_other_file_and_no_network() -> None:
    page = page_html(make_report())
    assert not re.search(r"""(src|href)\s*=|@import|url\(|https?://|fetch\(|XMLHttp""", page)
    assert not re.search(r"@[A-Z]+@", page)


def test_every_rank_of_both_orders_is_in_the_drawing() -> None:
    report = make_report()
    data = data_of(page_html(report))
    assert [order["name"] for order in data["orders"]] == ["planned", "Slurm's"]
    for order, placement in zip(data["orders"], (report.placement, report.slurm), strict=True):
        places = [(data["nodes"][node], gpu) for node, gpu in zip(order["node"], order["gpu"], strict=True)]
        assert places == [place_of(placement, rank) for rank in range(64)]
    assert len(data["nodes"]) == 16  # also those of other runs
    assert {data["boxes"][box][0] for box in data["nodeBox"]} == {
        f"pod{pod}.leaf{leaf}" for pod in range(2) for leaf in range(2)
    }


def test_names_cannot_end_the_data_early() -> None:
    report = replace(make_report(), name="</script><b>", notes=("<!--", "</script>"))
    page = page_html(report)
    assert data_of(page)["notes"][:2] == ["<!--", "</script>"]
    assert page.count("</script>") == page_html(make_report()).count("</script>")
    assert "<title>&lt;/script&gt;&lt;b&gt;</title>" in page


def test_leaves_without_ranks_are_counted_and_nodes_without_a_link_have_a_box_of_their_own() -> None:
    leaves = {"a": ("x.r0", "x.r1"), "b": ("x.r0", None), "c": ("y.r0", "y.r1"), "d": (None, None)}
    nodes = {name: FabricNode(name, ends) for name, ends in leaves.items()}
    fabric = Fabric(nodes, {leaf: "p" for leaf in ("x.r0", "x.r1", "y.r0", "y.r1")}, {}, "a test")
    drawing = draw_fabric(fabric, ["a", "d"])
    assert [node.name for node in drawing.nodes] == ["a", "b", "d"]
    assert drawing.boxes == (("x", 0), ("", 1))
    assert drawing.pods == ("p (and 1 leaves without ranks)", NO_LINK)


ASK = """<script>
const all = Array.from({ length: numRanks }, (_, rank) => rank);
document.body.dataset.answer = JSON.stringify(orders.map((order) => all.map((rank) => axisNames.map((_, axis) => ({
  group: groupOf(rank, axis),
  sends: neighbours(rank, axis).map((other) => other < 0 ? null : [other, tierBetween(order, rank, other)]),
})))));
const small = fitting(60, 60);
const scale = Math.min(1, 60 / small.width, 60 / small.height);
const texts = [];
const context = { measureText: (text) => ({ width: text.length }), fillText: (text) => texts.push(text) };
for (const width of [11, 6, 1]) fittedText(context, "pod10.leaf3", 0, 0, width);
document.body.dataset.looks = JSON.stringify({
  taken: [small.width, small.height].map((size) => (size * scale) / 60),
  names: data.boxes.map((_, box) => nameInPod(box)), texts,
  headers: [...document.querySelectorAll("#summary th")].map((cell) => cell.textContent),
});
show(13, true);
chooseColour(1); chooseOrder(1); redraw();
</script>"""


@pytest.mark.parametrize("clos", ["a fabric", None])
def test_a_browser_shows_groups_neighbours_and_tiers_as_they_are(tmp_path: Path, clos: str | None) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on PATH (apt-get install chromium)")
    config = make_config({"pp": 2, "tp": 4, "dp": 8})
    report = make_report(config=config) if clos else make_report(None, config=config)
    path = tmp_path / "plan.html"
    path.write_text(page_html(report).replace("</body>", ASK + "</body>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, "--dump-dom", f"file://{path}"], capture_output=True, text=True, timeout=90)
    body = re.search(r"<body([^>]*)>", done.stdout)
    assert body is not None, done.stderr
    assert "data-load-ms" in body[1]
    answer = re.search(r'data-answer="([^"]*)"', body[1])
    assert answer is not None
    orders = json.loads(answer[1].replace("&quot;", '"'))
    mesh, patterns = report.mesh, {entry.axis: entry.pattern for entry in report.traffic}
    placements = [report.placement, report.slurm] if report.is_moved else [report.placement]
    assert len(orders) == len(placements)
    for placement, told in zip(placements, orders, strict=True):
        for rank, by_axis in enumerate(told):
            for axis, found in zip(AXES, by_axis, strict=True):
                group = mesh.group_of(rank, axis)
                assert tuple(found["group"]) == group
                expected = _sends(group, group.index(rank), patterns.get(axis, "ring"))
                assert [None if sent is None else sent[0] for sent in found["sends"]] == expected
                for other, tier in filter(None, found["sends"]):
                    assert tier == _tier(report.fabric, place_of(placement, rank), place_of(placement, other))
    assert "tp group: ranks 12, 13, 14, 15" in done.stdout
    looks = re.search(r'data-looks="([^"]*)"', body[1])
    assert looks is not None
    _check_looks(json.loads(looks[1].replace("&quot;", '"')), has_fabric=clos is not None)


def _check_looks(looks: dict[str, Any], *, has_fabric: bool) -> None:
    """Where not even the smallest cells fit, the drawing takes the room there is; cut names stay apart; a title is
    said once.
    """
    assert max(looks["taken"]) > 0.9 and min(looks["taken"]) > 0.4
    assert looks["texts"] == ["pod10.leaf3", "\u2026leaf3"], "one that has no room for a letter is left out"
    assert "estimates" not in looks["headers"]
    if has_fabric:
        assert looks["names"] == ["leaf0", "leaf1", "leaf0", "leaf1"]


def _sends(group: tuple[int, ...], place: int, pattern: str) -> list[int | None]:
    after = group[(place + 1) % len(group)] if len(group) > 1 else None
    if pattern == "ring":
        return [after, None]
    return [group[place + 1] if place + 1 < len(group) else None, group[place - 1] if place else None]


def _tier(fabric: Fabric | None, here: tuple[str, int], there: tuple[str, int]) -> str:
    if fabric is None:
        return "node" if here[0] == there[0] else "network"
    return fabric.tier(*here, *there)

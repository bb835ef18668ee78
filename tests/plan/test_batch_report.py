"""A step's report: figures that agree with the plan, its JSON, and the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpc_train.config import Config
from hpc_train.errors import ConfigError
from hpc_train.plan.batch_check import check_batch_plan
from hpc_train.plan.batch_cost import TICK_S
from hpc_train.plan.batch_of_run import check_hdp, set_up_batches
from hpc_train.plan.batch_page import batch_page_html
from hpc_train.plan.batch_profile import derived_profile
from hpc_train.plan.batch_report import BatchReport, batch_json, batch_text, report_batch, runs_text
from hpc_train.plan.batch_setup import BatchSetup
from hpc_train.plan.mesh import Mesh
from tests.plan.test_batch_profile import TIMES, hdp_config, measured

MESH = Mesh(pp=1, dp=12, cp=1, tp=2)
LENGTHS = [60_000, 20_000, 9000, *[3000] * 20, *[200] * 50, 1]


def make_batch_report(mesh: Mesh = MESH, lengths: list[int] | None = None, **changes: object) -> BatchReport:
    config = hdp_config(**changes)
    nodes = [f"n{rank // 4}" for rank in range(mesh.dp)]
    profile = derived_profile(config, mesh)
    return report_batch(config, mesh, 3, LENGTHS if lengths is None else lengths, profile, nodes)


def test_the_text_says_who_does_what_and_against_what() -> None:
    report = make_batch_report()
    text = batch_text(report)
    assert "small, step 3: 74 sequences with" in text and "on 12 hdp ranks" in text
    assert re.search(r"modelled time of the step +\S+ \S+ +\S+ \S+ \(\d\.\d\dx\)", text)
    assert re.search(r"^60000 +\d+ +[-\d,]+", text, re.MULTILINE)
    assert len(re.findall(r"^\d+ +n\d ", text, re.MULTILINE)) == 12
    assert "note: costs: derived" in text
    assert report.planned.table.digest.hex() in text


def test_many_ranks_are_told_by_those_that_end_last_and_first() -> None:
    mesh = Mesh(pp=1, dp=64, cp=1, tp=2)
    text = batch_text(make_batch_report(mesh))
    assert len(re.findall(r"^\d+ +n\d+ ", text, re.MULTILINE)) == 16
    assert "(8 that end last, 8 that end first)" in text


def test_json_has_every_pack_and_rank_and_agrees_with_the_plan() -> None:
    report = make_batch_report()
    found = json.loads(json.dumps(batch_json(report), allow_nan=False))
    assert found["lengths"] == LENGTHS and found["hash"] == report.planned.table.digest.hex()
    assert sorted(number for pack in found["packs"] for number in pack["sequences"]) == list(range(len(LENGTHS)))
    ends = [entry["end_s"] for entry in found["ranks"]]
    assert max(ends) == pytest.approx(found["planners"]["balanced"]["time_s"])
    for rank, entry in enumerate(found["ranks"]):
        own = [pack for pack in found["packs"] if rank in pack["ranks"]]
        assert entry["end_s"] == pytest.approx(max((pack["end_s"] for pack in own), default=0.0))
        assert entry["busy_s"] == pytest.approx(sum(pack["end_s"] - pack["begin_s"] for pack in own))
        assert entry["node"] == f"n{rank // 4}"
    assert set(found["planners"]) == {"balanced", "static"}
    assert found["planners"]["static"]["time_s"] >= found["planners"]["balanced"]["time_s"] >= found["least_time_s"]
    check_batch_plan(report.planned.table.plan(), LENGTHS, [8192] * 12)


def test_a_pack_begins_when_its_last_rank_is_free() -> None:
    report = make_batch_report()
    planned, table = report.planned, report.planned.table
    for one in (planned, report.static):
        assert one is not None
        ends = np.zeros(one.table.num_ranks, np.int64)
        for pack in range(one.table.num_packs):
            members = one.table.ranks[one.table.first_rank[pack] : one.table.first_rank[pack + 1]]
            assert one.spans.begins[pack] == ends[members].max()
            ends[members] = one.spans.ends[pack]
        assert np.array_equal(ends, one.times.ends)
    assert int(planned.tokens.sum()) >= sum(LENGTHS) and planned.tokens.max() <= 8192 * table.num_micro_batches.max()


def test_ranks_tokens_are_those_of_the_plan_and_add_up_to_the_step_s() -> None:
    """Odd sequences too, whose parts of a ring are padded to equal ones."""
    report = make_batch_report(lengths=[*LENGTHS, 10_001, 9_999])
    for one in report.plans:
        own = [sum(micro_batch.num_tokens for micro_batch in of_rank) for of_rank in one.table.plan().ranks]
        assert one.tokens.tolist() == own and sum(own) == report.lengths.sum()


def test_the_baseline_alone_is_not_compared_with_itself() -> None:
    report = make_batch_report(hdp={"planner": "static"})
    assert report.static is None and list(batch_json(report)["planners"]) == ["static"]


def test_a_step_that_rings_of_one_size_cannot_hold_is_planned_and_the_reason_told() -> None:
    """7 ranks hold 57,344 tokens, and a row of data.seq_len=65,536 does not fit on them."""
    mesh = Mesh(pp=1, dp=7, cp=1, tp=2)
    report = make_batch_report(mesh, [57_000, 100], hdp={"offload": True}, train={"recompute": "none"})
    assert report.static is None
    assert any(note.startswith("static cannot plan this step:") for note in report.notes)
    assert "57000" in batch_text(report)


def test_a_step_without_sequences_has_no_packs() -> None:
    report = make_batch_report(lengths=[])
    assert batch_json(report)["packs"] == [] and "0 sequences" in batch_text(report)
    assert '"packs":[]' in batch_page_html(report)


def test_pipelines_get_as_many_micro_batches_as_stages() -> None:
    mesh = Mesh(pp=4, dp=8, cp=1, tp=2)
    for planner in ("balanced", "naive", "static"):
        report = make_batch_report(mesh, [30_000, 100], hdp={"planner": planner}, parallel={"pp": 4})
        assert report.planned.table.num_micro_batches.min() >= 4
    assert any("what stages wait" in note for note in report.notes)


def test_interleaved_pipelines_get_equally_many_micro_batches() -> None:
    mesh, parallel = Mesh(pp=2, dp=8, cp=1, tp=2), {"pp": 2, "virtual_stages": 2}
    for planner in ("balanced", "naive", "static"):
        counts = make_batch_report(mesh, hdp={"planner": planner}, parallel=parallel).planned.table.num_micro_batches
        assert counts.min() == counts.max() >= 2


def test_nodes_of_other_speed_get_less() -> None:
    config = hdp_config()
    profile = measured(config, speeds={"n1": 0.5})
    report = report_batch(config, MESH, 1, [2000] * 96, profile, [f"n{rank // 4}" for rank in range(12)])
    assert report.planned.tokens[4:8].max() < report.planned.tokens[:4].min()


def test_agents_plan_alike_from_what_they_are_sent() -> None:
    offload = hdp_config(hdp={"offload": True}, train={"recompute": "none"})
    for config in (offload, hdp_config(parallel={"virtual_stages": 2})):
        _check_agents(config)


def _check_agents(config: Config) -> None:
    setup = set_up_batches(config, MESH, measured(config, speeds={"n2": 0.7}), [f"n{rank // 4}" for rank in range(12)])
    received = BatchSetup.from_json(json.loads(json.dumps(setup.to_json())))
    for step in range(3):
        assert received.plan(step, LENGTHS).digest == setup.plan(step, LENGTHS).digest
    assert received.to_json() == setup.to_json()


@pytest.mark.parametrize("hdp", [{}, {"offload": True}])
@pytest.mark.parametrize("slower", [1.0, 1e5, 1e8])
def test_a_slow_machine_s_plan_is_that_of_a_fast_one_in_longer_ticks(hdp: dict[str, object], slower: float) -> None:
    """Also where all of a step's tokens are in the longest sequences."""
    config = hdp_config(hdp=hdp, train={"recompute": "none", "global_batch_size": 16})
    fast = measured(config, micro_batch_s=0.0)
    times = {name: getattr(fast, name) * slower for name in TIMES}
    for lengths in (LENGTHS, [65536] * 16):
        usual, slow = (report_batch(config, MESH, 1, lengths, profile) for profile in (fast, replace(fast, **times)))
        assert usual.setup.costs.tick_s == TICK_S and (slow.setup.costs.tick_s > TICK_S) == (slower > 1)
        # Three digits of attention's cost are left.
        found = slow.seconds(slow.planned.times.makespan) / usual.seconds(usual.planned.times.makespan)
        assert found == pytest.approx(slower, rel=0.01)


def test_times_too_far_apart_for_64_bits_are_refused_with_what_they_are() -> None:
    config = hdp_config()
    with pytest.raises(ConfigError, match=r"planned in 62 bits .*attention of 9.21e-12 s .* 1e\+03 s a token"):
        set_up_batches(config, MESH, measured(config, linear_s_per_token=1e3))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hdp": {"capacity_tokens": 127}}, "capacity_tokens=127 is less than one block of attention .128 tokens"),
        ({"hdp": {"capacity_tokens": 8191}, "parallel": {"sequence_parallel": True}}, "Use capacity_tokens=8190"),
        ({"hdp": {"planner": "static", "offload": True}, "train": {"recompute": "none"}},
         "offload has no effect with parallel.hdp.planner=static, .* Use parallel.hdp.offload=false, or parallel.hdp"),
        ({"hdp": {"planner": "static", "capacity_tokens": 1000}}, "or parallel.hdp.offload=true, or data.seq_len=12"),
        ({"hdp": {"offload": True}}, "train.recompute=selective does not keep. Use train.recompute=none"),
        ({"hdp": {"offload": True}, "parallel": {"pp": 2, "virtual_stages": 2}, "train": {"recompute": "none"}},
         "offload does not go with parallel.virtual_stages=2: .* Use parallel.virtual_stages=1, or parallel.hdp.off"),
        ({"hdp": {"capacity_tokens": 1000}},
         "data.seq_len=65536 is longer than what 12 hdp ranks of parallel.hdp.capacity_tokens=1000 hold together at "
         "offload ratio 0, 12000 tokens. Use 132 ranks, or parallel.hdp.capacity_tokens=5462, or parallel.hdp.offload"),
    ({"hdp": {"capacity_tokens": 128, "offload": True}, "train": {"recompute": "none"}},
     "capacity_tokens=128 hold together with offloading .(24577 tokens need more to leave than the layers that may|"
     r"\d+ tokens need the offload ratio 0.\d+), and copies of \d.\d+ hide., \d+ tokens. Use 1024 ranks"),
    ],
)  # fmt: skip
def test_sizes_that_no_rank_can_have_are_refused_without_lengths(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_hdp(hdp_config(**changes), MESH)


def test_a_sequence_that_all_ranks_cannot_hold_is_told_with_capacity_ratio_and_what_fits() -> None:
    for offload, ratio in ((False, "offload ratio 0"), (True, "may be offloaded as far as copies hide")):
        with pytest.raises(ConfigError, match="sequence 1 of step 3 has 9000000 tokens") as caught:
            make_batch_report(lengths=[5, 9_000_000], hdp={"offload": offload}, train={"recompute": "none"})
        assert ratio in str(caught.value) and "8192 tokens" in str(caught.value) and "a context of" in str(caught.value)


def test_runs_of_ranks_are_joined_and_many_left_out() -> None:
    assert runs_text([3, 4, 5, 1, 9, 10]) == "3-5,1,9-10"
    assert runs_text(range(0, 40, 2)).count("...") == 1


ASK = """<script>
const told = plans.map((plan) => ({ name: plan.name, end: plan.end, packs: plan.packs.length,
  ofRank: plan.ofRank.map((list) => list.length) }));
element("find").value = "n1";
element("find").dispatchEvent(new Event("input"));
document.body.dataset.answer = JSON.stringify({ told, shown: element("shown").textContent });
</script>"""


def test_a_browser_draws_every_pack_of_every_rank(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on PATH (apt-get install chromium)")
    report = replace(make_batch_report(), name="</script><b>")
    page = batch_page_html(report)
    assert not re.search(r"""(src|href)\s*=|@import|url\(|https?://|fetch\(|XMLHttp""", page)
    path = tmp_path / "step.html"
    path.write_text(page.replace("</body>", ASK + "</body>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, "--dump-dom", f"file://{path}"], capture_output=True, text=True, timeout=90)
    body = re.search(r"<body([^>]*)>", done.stdout)
    assert body is not None and "data-load-ms" in body[1], done.stderr
    answer = re.search(r'data-answer="([^"]*)"', body[1])
    assert answer is not None
    found = json.loads(answer[1].replace("&quot;", '"'))
    assert [one["name"] for one in found["told"]] == ["balanced", "static"]
    for one, told in zip(report.plans, found["told"], strict=True):
        assert told["packs"] == one.table.num_packs
        assert told["end"] == round(report.seconds(one.times.makespan) * 1e9)
        assert told["ofRank"] == [int((one.table.ranks == rank).sum()) for rank in range(12)]
    assert found["shown"].startswith("hdp rank 4 on n1")

"""The report of a plan: figures for plan.json, tables for people."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hpc_train.cluster.fabric_clos import clos_fabric
from hpc_train.config_read import load_config
from hpc_train.errors import ConfigError
from hpc_train.plan.checkpoint_flow import plan_checkpoint
from hpc_train.plan.homes import find_homes
from hpc_train.plan.mesh import AXES, Mesh
from hpc_train.plan.parameters import num_parameters
from hpc_train.plan.placement import make_placement
from hpc_train.plan.report import report_plan
from hpc_train.plan.run import RAILS, Plan
from hpc_train.plan.table import report_text, sections_of, size_text, summary_line
from tests.plan.allocations import place_of
from tests.plan.reports import CLOS, make_allocation, make_config, make_report


def test_plan_json_has_the_figures_that_others_rely_on() -> None:
    report = make_report()
    document = json.loads(report.plan.to_json())
    assert document["bytes_per_rank"].keys() == {"pp", "dp", "tp"}
    traffic = document["traffic"]
    for order in ("slurm_order", "planned"):
        assert list(traffic[order]) == ["node", "leaf", "spine", "core"]
        assert sum(traffic[order].values()) == sum(traffic["planned"].values()) > 0
    weights = report.fabric.hop_weights if report.fabric else {}
    for order, hops in traffic["byte_hops"].items():
        assert hops == sum(traffic[order][tier] * weight for tier, weight in weights.items()) // 1000
    assert traffic["byte_hops"]["planned"] < traffic["byte_hops"]["slurm_order"]
    hidden = {f"{axis}_hidden_at_best" for axis in ("dp", "pp", "tp")}
    assert document["estimate"].keys() == {"memory_bytes", "bubble", "step_time_s", "mfu"} | hidden
    assert document["estimate"]["step_time_s"] is None and 0 < document["estimate"]["bubble"] < 1
    assert Plan.from_json(report.plan.to_json()) == report.plan


def test_a_rank_and_its_coordinates_do_not_depend_on_the_placement() -> None:
    report = make_report()
    assert report.is_moved
    for planned in report.plan.ranks:
        assert planned.coords == report.mesh.coords(planned.rank)
        assert (planned.node, planned.gpu) == place_of(report.placement, planned.rank)
    assert len({(planned.node, planned.gpu) for planned in report.plan.ranks}) == 64


def test_the_same_input_gives_the_same_plan_and_another_fabric_another_hash() -> None:
    assert make_report().plan.hash == make_report().plan.hash
    assert make_report().plan.hash != make_report(CLOS.replace("shuffle=3", "shuffle=4")).plan.hash


def test_a_group_lives_where_its_highest_transfer_climbs_to() -> None:
    report = make_report(config=make_config({"pp": 2, "tp": 2, "dp": 16}))
    fabric, placement, mesh = report.fabric, report.placement, report.mesh
    assert fabric is not None
    for home in find_homes(placement, fabric, report.traffic):
        pattern = next(entry.pattern for entry in report.traffic if entry.axis == home.axis)
        expected: dict[str, int] = {}
        for group in mesh.groups(home.axis):
            pairs = list(zip(group, (*group[1:], group[0]) if pattern == "ring" else group[1:], strict=False))
            tiers = [fabric.tier(*place_of(placement, a), *place_of(placement, b)) for a, b in pairs]
            highest = max(tiers, key=["node", "leaf", "spine", "core"].index)
            expected[highest] = expected.get(highest, 0) + 1
        assert home.by_tier == expected
        assert home.num_groups == sum(expected.values())


def test_with_the_peak_of_a_gpu_step_time_and_utilisation_are_estimated_and_how_is_said() -> None:
    train = {"steps": 1, "global_batch_size": 64, "peak_flops_per_rank": 1e12}
    text = report_text(make_report(config=make_config(train=train)))
    for words in ("pipeline bubble", "step time", "MFU", "note: step time: modelled", "Megatron-LM"):
        assert words in text
    without = report_text(make_report())
    assert "MFU  " not in without and "note: step time and MFU are not known" in without


def test_what_can_be_hidden_is_printed_and_where_a_schedule_is_too_long_to_be_played_a_note_says_so() -> None:
    text = report_text(make_report())
    assert all(f"{axis} hidden at best, at 0.8x of compute" in text for axis in ("dp", "pp"))
    long = report_text(make_report(config=make_config(train={"steps": 1, "global_batch_size": 8 * 1001})))
    assert "dp hidden at best" in long and "pp hidden at best" not in long
    assert "note: what can be hidden of pp's transfers at best is not known" in long and "of dp's transfers" not in long


def test_what_is_wanted_of_nccl_is_printed_with_its_reason_and_kept_in_the_plan() -> None:
    report = make_report(config=make_config({"pp": 2, "tp": 8}))
    assert {setting.name for setting in report.nccl} >= {"NCCL_CROSS_NIC", "NCCL_IB_TIMEOUT"}
    assert report.plan.further["nccl"] == {setting.name: setting.value for setting in report.nccl}
    for setting in report.nccl:
        assert f"note: wanted of NCCL: {setting.name}={setting.value}: {setting.reason}" in report_text(report)
    assert make_report(None).nccl == ()


def test_without_a_topology_ranks_stay_in_slurms_order_and_the_report_says_so() -> None:
    report = make_report(None)
    assert not report.is_moved
    assert "traffic" not in report.plan.further
    assert [section.title for section in sections_of(report)][:1] == ["Groups"]
    assert "no topology" in report_text(report)
    assert summary_line(report).startswith("placement: Slurm's order of nodes, since no topology is known")


def test_the_summary_is_one_line_with_the_gain() -> None:
    report = make_report()
    assert report.planned is not None and report.before is not None
    ratio = report.planned.byte_hops / report.before.byte_hops
    assert f"byte-hops {ratio:.2f}x of Slurm's order" in summary_line(report)
    assert "tp inside a node" in summary_line(report)
    assert "\n" not in summary_line(report)


def test_the_text_can_be_read_in_ten_seconds() -> None:
    text = report_text(make_report())
    assert len(text.splitlines()) <= 40
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("note: "))
    for axis in ("tp", "dp", "pp"):
        assert any(line.startswith(f"{axis} ") for line in text.splitlines())


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (99 * 2**30, "99 GiB"),
        (1023 * 2**30, "1023 GiB"),
        (2**62, "4096 PiB"),
    ],
)
def test_sizes_are_said_with_three_digits_or_whole(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


def test_a_node_that_the_fabric_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="n99"):
        report_plan(make_config(), make_allocation(["n1", "n99"]), clos_fabric("clos:pods=1,nodes=4"))


def test_tp_larger_than_a_node_is_refused() -> None:
    config = make_config({"pp": 1, "tp": 8})
    with pytest.raises(ConfigError, match="tp=8"):
        report_plan(config, make_allocation(["n0", "n1"], tasks=4), clos_fabric("clos:pods=1,nodes=4,gpus=4"))


def test_16384_ranks_are_reported_whole() -> None:
    config = make_config({"pp": 8, "tp": 8}, train={"steps": 1, "global_batch_size": 2048})
    report = make_report("clos:pods=8,nodes=512,shuffle=1", 2048, config)
    assert report.plan.world_size == 16384
    assert np.array_equal(np.unique(report.placement.node_of_rank), np.arange(2048))
    assert report.plan.groups == {} and len(report.plan.with_groups().groups["tp"]) == 2048
    assert replace(report, notes=()).plan.hash == report.plan.hash
    assert [home.axis for home in report.homes] == [axis for axis in reversed(AXES) if axis != "cp"]


def test_who_keeps_whose_copy_is_in_the_plan_of_a_run_with_copies_and_in_no_other() -> None:
    copied = make_report(config=make_config(checkpoint={"local": {"path": "/scratch", "every": 10}}))
    holders = copied.plan.further["copy_holders"]
    assert sorted(holders) == list(range(8)) and all(node != other for node, other in enumerate(holders))
    assert "copy_holders" not in make_report().plan.further


def test_a_checkpoint_of_175b_on_12288_gpus_is_written_evenly_and_read_once() -> None:
    """Its time is in docs/measurements/checkpoints.md; that ranks hold what is planned, in test_resharding.py."""
    config, mesh = load_config("gpt-175b"), Mesh(pp=8, dp=192, cp=1, tp=8)
    rank = np.arange(mesh.world_size)
    nodes = tuple(f"n{node}" for node in range(1536))
    flow = plan_checkpoint(config, make_placement(mesh, nodes, rank // 8, rank % 8, "slurm"), rank % 8)
    assert flow.num_bytes == 12 * num_parameters(config.model, config.data.seq_len)
    assert flow.num_writers == mesh.world_size
    assert 1 <= flow.written_over_mean <= 1.1 and 1 <= flow.read_over_mean <= 1.1
    assert flow.read_over_state == 1
    assert flow.most_written == pytest.approx(flow.written_over_mean * flow.num_bytes / mesh.world_size)


def test_the_plan_has_the_rails_that_the_fabric_knows() -> None:
    report = make_report()
    assert report.fabric is not None
    assumed = replace(report.fabric, are_rails_known=False)
    assert RAILS not in report_plan(make_config(), report.allocation, assumed).plan.further
    turned = tuple((gpu + 3) % 8 for gpu in range(8))
    of_node = {name: replace(other, rail_of_gpu=turned) for name, other in report.fabric.nodes.items()}
    fabric = replace(report.fabric, nodes=of_node, are_rails_known=True)
    plan = report_plan(make_config(), report.allocation, fabric).plan
    assert plan.further[RAILS] == [turned[planned.gpu] for planned in plan.ranks]

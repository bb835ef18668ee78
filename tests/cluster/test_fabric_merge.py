"""Sources put together: what is filled in, and which contradictions are told."""

from __future__ import annotations

from dataclasses import replace

from hpc_train.cluster.fabric import Fabric, FabricNode
from hpc_train.cluster.fabric_clos import clos_fabric
from hpc_train.cluster.fabric_merge import merge_fabrics, merge_reports, with_gpus
from hpc_train.cluster.fabric_node import NodeReport
from hpc_train.cluster.fabric_slurm import read_slurm_lines

TREE = "SwitchName=s0 Nodes=a,b\nSwitchName=s1 Nodes=c\nSwitchName=top Switches=s[0-1]\n"


def tree() -> Fabric:
    return read_slurm_lines(TREE, "scontrol")


def cabled(leaf_of_b: str = "x") -> Fabric:
    leaves = {"a": "x", "b": leaf_of_b, "c": "y"}
    nodes = {name: FabricNode(name, tuple(f"{leaf}.r{rail}" for rail in (0, 1))) for name, leaf in leaves.items()}
    pods = {f"{leaf}.r{rail}": "p" for leaf in "xy" for rail in (0, 1)}
    return Fabric(nodes, pods, {}, "ib", link_bytes_per_s={"leaf": 5}, rail_nics=("mlx5_0", "mlx5_2"))


def test_true_rails_take_the_place_of_leaf_sets() -> None:
    first = replace(tree(), nodes={name: replace(node, num_gpus=2) for name, node in tree().nodes.items()})
    merged = merge_fabrics(first, cabled())
    assert merged.nodes["a"] == FabricNode("a", ("x.r0", "x.r1"), 2)
    assert merged.pod_of_leaf == cabled().pod_of_leaf
    assert (merged.source, merged.rail_nics, merged.notes) == ("scontrol and ib", ("mlx5_0", "mlx5_2"), ())


def test_true_rails_of_a_part_of_the_nodes_do_not() -> None:
    part = replace(cabled(), nodes={name: node for name, node in cabled().nodes.items() if name != "c"})
    merged = merge_fabrics(tree(), part)
    assert merged.nodes["a"].leaves == ("s0",)
    assert merged.link_bytes_per_s == {"leaf": 5}
    assert "ib lacks 1 of the 3 nodes of scontrol" in merged.notes


def test_leaves_that_the_sources_see_differently_are_told_both_ways() -> None:
    merged = merge_fabrics(tree(), cabled(leaf_of_b="y"))
    assert "a and b share their leaf by scontrol, but not by ib" in merged.notes
    assert "b and c share their leaf by ib, but not by scontrol" in merged.notes


def test_details_that_differ_are_told_and_the_first_is_used() -> None:
    first = replace(tree(), nodes={name: replace(node, num_gpus=8) for name, node in tree().nodes.items()})
    second = replace(tree(), source="file", nodes={
        name: replace(node, num_gpus=4, nvlink_domain="rack") for name, node in tree().nodes.items()
    })  # fmt: skip
    merged = merge_fabrics(first, second)
    assert merged.nodes["c"] == FabricNode("c", ("s1",), 8, nvlink_domain="rack")
    assert merged.notes == ("a,b,c: num_gpus is 8 by scontrol, 4 by file; the first is used",)


def test_cards_that_nodes_report_make_the_rails_known() -> None:
    reports = [NodeReport(name, num_gpus=2, nics=("mlx5_2", "mlx5_0"), nvlink_domain="r.1") for name in "abc"]
    merged = merge_reports(cabled(), reports)
    assert merged.nodes["b"] == FabricNode("b", ("x.r0", "x.r1"), 2, (1, 0), "r.1")
    assert merged.are_rails_known
    by_number = [NodeReport(name, num_gpus=2, nics=("mlx5_10", "mlx5_2")) for name in "abc"]
    assert merge_reports(tree(), by_number).nodes["a"].rail_of_gpu == (1, 0)
    # A card that is gone on one node does not move the others of that node.
    lame = [*by_number[:2], NodeReport("c", num_gpus=2, nics=("mlx5_10", "mlx5_10"))]
    assert merge_reports(tree(), lame).nodes["c"].rail_of_gpu == (1, 1)
    strange = merge_reports(cabled(), by_number)
    assert strange.nodes["a"].rail_of_gpu is None
    assert not strange.are_rails_known
    assert strange.notes == ("a,b,c: the card mlx5_10 is near to a GPU, but no rail of ib",)


def test_reports_without_cards_leave_rails_assumed() -> None:
    merged = merge_reports(
        tree(), [NodeReport("a", num_gpus=2, nics=("mlx5_0", None)), NodeReport("b"), NodeReport("x")]
    )
    assert merged.nodes["a"] == FabricNode("a", ("s0",), 2)
    assert not merged.are_rails_known
    assert merged.notes == ("a: which card is near to which GPU is not clear, so rail i is assumed for GPU i",)
    assert not merge_reports(tree(), []).are_rails_known


def test_gpu_counts_that_differ_are_told() -> None:
    fabric = clos_fabric("clos:pods=1,nodes=3,gpus=4,prefix=c")
    merged = merge_reports(fabric, [NodeReport("c1", num_gpus=8, nics=("m0",) * 8)])
    assert "c1: 8 GPUs are there, 4 by clos:pods=1,nodes=3,gpus=4,prefix=c; the latter is used" in merged.notes
    same, problems = with_gpus(fabric, {"c0": 4, "c1": 2})
    assert (same.nodes, problems) == (fabric.nodes, ())
    assert same.notes[-1] == "c1: the job has a part of the GPUs, which are assumed to be the node's first ones"
    _, problems = with_gpus(fabric, {"c0": 4, "c1": 8})
    assert problems == (f"the fabric has fewer GPUs than the job: c1 (8 by Slurm, 4 by {fabric.source})",)
    filled, _ = with_gpus(tree(), {"a": 8, "b": 0})
    assert [filled.nodes[name].num_gpus for name in "abc"] == [8, None, None]

"""The YAML file of a fabric: what is read, what is refused and where, and that it comes back as it was written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.cluster.fabric import Fabric, FabricNode
from hpc_train.cluster.fabric_clos import clos_fabric
from hpc_train.cluster.fabric_file import read_fabric_file
from hpc_train.cluster.fabric_write import write_fabric_file
from hpc_train.errors import ConfigError

TEXT = """\
# Two leaf sets below one spine, and a pod whose rails were looked up.
version: 1
oversubscription: {core: 2}
num_gpus: 2
pods:
  east:
    core: core0
    leaves:
      l0: {nodes: "n[1-2]", uplinks: 32}
      l1: {nodes: "n3"}
  west:
    core: core0
    uplinks: 64
    leaves:
      w.r0: {nodes: "w[1-2]", rail: 0}
      w.r1: {nodes: "w1", rail: 1}
nodes:
  n3: {num_gpus: 4, down_rails: [1], nvlink_domain: rack7}
  w[1-2]: {rail_of_gpu: [1, 0]}
"""


def read(text: str) -> Fabric:
    return read_fabric_file(text, "fabric.yaml")


def same_but_source(first: Fabric, second: Fabric) -> bool:
    return replace(first, source="") == replace(second, source="")


def test_leaf_sets_rails_and_what_single_nodes_differ_in() -> None:
    fabric = read(TEXT)
    assert fabric.nodes["n1"] == FabricNode("n1", ("l0",), 2)
    assert fabric.nodes["n3"] == FabricNode("n3", ("l1",), 4, nvlink_domain="rack7", down_rails=(1,))
    assert fabric.nodes["n3"].leaf(1) is None
    assert fabric.nodes["w2"] == FabricNode("w2", ("w.r0", None), 2, (1, 0))
    assert fabric.nodes["w1"].leaf(fabric.nodes["w1"].rail(0)) == "w.r1"
    assert (fabric.leaf_uplinks, fabric.pod_uplinks) == ({"l0": 32}, {"west": 64})
    assert fabric.hop_weights["core"] == 10000
    assert fabric.tier("n1", 0, "w1", 0) == "core"


@pytest.mark.parametrize(
    "fabric",
    [
        read(TEXT),
        clos_fabric("clos:pods=3,nodes=40,shuffle=5,core_oversubscription=1.5"),
        clos_fabric("clos:pods=1,nodes=3,gpus=4,rails=2"),
        # One switch with all cards, one of them on another node's rail.
        Fabric(
            {"a": FabricNode("a", ("s", "s", None)), "b": FabricNode("b", ("s", None, "s"), 3)},
            {"s": "p"}, {}, "x", leaf_uplinks={"s": 4}, rail_nics=("m0", "m1", "m2"),
        ),
    ],
    ids=["text", "clos", "shared rails", "one switch"],
)  # fmt: skip
def test_what_is_written_is_read_back(fabric: Fabric) -> None:
    assert same_but_source(read(write_fabric_file(fabric)), fabric)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("version: 1", "version: 2", 2, "knows version 1"),
        ("version: 1", "vrsion: 1", 2, "vrsion: unknown key"),
        ("num_gpus: 2", "num_gpus: two", 4, "'two' is not a whole number"),
        ("num_gpus: 2", "num_gpus: true", 4, "True is not a whole number"),
        ("{core: 2}", "{core: 0.5}", 3, "not a ratio"),
        ('"n3"', '"n2"', 10, "the node n2 hangs on the leaf l0 with all its rails already"),
        ('"w1", rail: 1', '"w1", rail: 0', 16, "the node w1 hangs on the leaf w.r0 with rail 0 already"),
        ('"w1", rail: 1', '"w1,n1", rail: 1', 16, "the node n1 hangs on the leaf l0 with all its rails already"),
        ("w.r1:", "l0:", 16, "the leaf l0 is in pod east already"),
        ('"n[1-2]"', '"n[1-"', 9, "never closed"),
        ('"n[1-2]"', '"n[1-2],n1"', 9, "n1 is listed twice"),
        ('"n[1-2]"', "[n1, n2]", 9, "expected a host list in quotes"),
        ("  n3: {num", "  n9: {num", 18, "the node n9 hangs on no leaf"),
        ("  n3: {num", "  w1: {num", 19, "the node w1 is described twice"),
        ("[1, 0]", "[1, 0, 2]", 19, "3 rails are given for 2 GPUs"),
        ("[1, 0]", "[1, 2]", 19, "a GPU on rail 2, but 2 rails have leaves"),
        ("rail: 0}", "rail: 99}", 15, "from 0 to 63"),
        ("    leaves:\n      w", "    leafs:\n      w", 14, "leafs: unknown key"),
        ("    leaves:\n      l0", "    leaves: {}\n    x:\n      l0", 9, "x: unknown key"),
        ("  west:", "  east:", 11, "the key 'east' is given twice"),
        ("pods:", "pods: [", 7, "not valid YAML"),
        ('"n3"', "2024-13-45", 10, "'2024-13-45' looks like timestamp and is none"),
        ("num_gpus: 2", "num_gpus: 0b_", 4, "'0b_' looks like int and is none"),
        ("num_gpus: 2", "num_gpus: " + "9" * 5000, 4, "looks like int and is none"),
        ("num_gpus: 2", "num_gpus: 0x" + "f" * 5000, 4, "beyond all numbers that are read here"),
        ("num_gpus: 2", "num_gpus: 3221225472", 4, "from 1 to 1024"),
        ("uplinks: 32", "uplinks: 3221225472", 9, "from 0 to 1000000"),
        ("uplinks: 64", "uplinks: 3221225472", 13, "from 0 to 1000000"),
        ("[1, 0]", "[0, 3000000000]", 19, "3000000000 is not a whole number from 0 to 63"),
        ("num_gpus: 2", "link_bytes_per_s: {leaf: " + "9" * 400 + "}", 4, "beyond all numbers"),
        ("num_gpus: 2", "link_bytes_per_s: {leaf: 999999999999999999}", 4, "from 1 to 100000000000000"),
        ("num_gpus: 2", "notes: &a [*a]", 4, "an alias stands inside of what it names"),
        ("pods:", "pods: &a\n  p: *a\nx:", 5, "an alias stands inside of what it names"),
        ("num_gpus: 2", "notes: " + "[" * 3000 + "]" * 3000, 4, "exceeded maximum nesting depth"),
        ("num_gpus: 2", "notes: " + "[" * 90 + "]" * 90, 4, "nested more than 64 deep"),
        ("  east:", "  e\0st:", 6, "a NUL byte"),
    ],
)
def test_faults_are_told_with_their_line(old: str, new: str, line: int, words: str) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError) as caught:
        read(TEXT.replace(old, new, 1))
    assert words in str(caught.value)
    assert f"fabric.yaml, line {line}:" in str(caught.value)


def test_aliases_that_multiply_are_refused_before_they_fill_the_memory() -> None:
    more = "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    with pytest.raises(ConfigError, match=r"fabric.yaml, line \d+: aliases stand for more than \d+ values"):
        read("version: 1\na0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + more + "pods: {}\n")


def test_a_fabric_without_nodes_and_a_link_that_no_card_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="line 2: pods: no pod has a leaf with nodes"):
        read("version: 1\npods: {}\n")
    one = 'version: 1\npods: {p: {leaves: {l: {nodes: "n1"}}}}\nnodes:\n  n1: {num_gpus: 2, down_rails: [7]}\n'
    with pytest.raises(ConfigError, match=r"line 4: .*the node n1 has no rail 7, but rails 0 to 1"):
        read(one)


def test_the_example_of_the_reference_is_read() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/fabric-file.md").read_text()
    fabric = read(page.split("```yaml\n")[1].split("```")[0])
    assert len(fabric.nodes) == 34
    assert fabric.nodes["w1"].nvlink_domain == "rack7"


@pytest.mark.parametrize("text", ["", "[]", "3"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="line 1: expected names with values below them"):
        read(text)

"""Slurm's topology.yaml: which of its topologies is taken, and what is refused."""

from __future__ import annotations

import pytest

from hpc_train.cluster.fabric_topology_yaml import read_topology_yaml
from hpc_train.errors import ConfigError

TEXT = """\
---
- topology: tree1
  cluster_default: true
  tree:
    switches:
      - switch: root
        children: s[1-2]
      - switch: s1
        nodes: node[01-02]
      - switch: s2
        nodes: node[03-04]
- topology: racks
  cluster_default: false
  block:
    block_sizes:
      - 2
      - 4
    blocks:
      - block: b1
        nodes: node[01-02]
      - block: b2
        nodes: node[03-04]
      - block: b3
        nodes: node[05-06]
- topology: plain
  flat: true
- topology: doughnut
  torus3d: {dimensions: 3}
"""


def test_the_named_topology_or_the_default_is_read() -> None:
    default = read_topology_yaml(TEXT, "topology.yaml")
    assert default is not None
    assert default.nodes["node03"].leaves == ("s2",)
    assert default.pod_of_leaf == {"s1": "root", "s2": "root"}
    assert default.source == "topology.yaml#tree1"
    racks = read_topology_yaml(TEXT, "topology.yaml", "racks")
    assert racks is not None
    assert racks.pod_of_leaf == {"b1": "blocks 0", "b2": "blocks 0", "b3": "blocks 1"}


def test_names_that_are_plain_numbers_need_no_quotes() -> None:
    text = TEXT.replace("switch: s1", "switch: 1").replace("switch: s2", "switch: 20").replace("s[1-2]", "1,20")
    default = read_topology_yaml(text.replace("node[03-04]", "7", 1), "topology.yaml")
    assert default is not None
    assert default.nodes["7"].leaves == ("20",) and default.pod_of_leaf == {"1": "root", "20": "root"}
    racks = read_topology_yaml(text.replace("block: b2", "block: 12"), "topology.yaml", "racks")
    assert racks is not None and racks.nodes["node03"].leaves == ("12",)


def test_a_flat_topology_tells_nothing() -> None:
    assert read_topology_yaml(TEXT, "topology.yaml", "plain") is None


def test_which_topology_is_meant_has_to_be_clear() -> None:
    with pytest.raises(ConfigError, match="there is no topology other; it has tree1, racks"):
        read_topology_yaml(TEXT, "topology.yaml", "other")
    undecided = TEXT.replace("cluster_default: true", "cluster_default: false")
    with pytest.raises(ConfigError, match=r"none of its topologies is the cluster's default.*Name one"):
        read_topology_yaml(undecided, "topology.yaml")


@pytest.mark.parametrize(
    ("old", "new", "name", "line", "words"),
    [
        ("switch: s1", "swich: s1", None, 8, "swich: unknown key"),
        ("children: s[1-2]", "children: s[1-3]", None, 6, "the switch s3 below it"),
        ("node[03-04]", "node[02-04]", None, 10, "node02 is below s2 and, on line 8, below s1"),
        ("node[01-02]", "node[01-02", None, 9, "never closed"),
        ("- topology: racks", "- name: racks", None, 12, "name: unknown key"),
        ("- topology: racks", "- topology: tree1", None, 12, "tree1 is described twice"),
        ("      - 2\n", "      - two\n", "racks", 15, "not a list of whole numbers"),
        ("flat: true", "flat: false", "plain", 25, "one of tree, block and flat; found none"),
        ("topology: tree1", "topology: tree1", "doughnut", 28, "kind torus3d cannot be used"),
        ("    switches:", "    switchs:", None, 5, "switchs: unknown key"),
        ("nodes: node[01-02]", "nodes:", None, 9, "expected a name or a host list"),
        ("nodes: node[01-02]", "nodes: yes", None, 9, "found bool True"),
        ("nodes: node[01-02]", "nodes: 001", None, 9, "found int 1"),
        ("switch: s1", "switch: 0x10", None, 8, "found int 16"),
        ("switch: s1", "switch:", None, 8, "found nothing"),
        ("switch: s1", "switch: [s1]", None, 8, "found list ['s1']"),
        ("block: b2", "block: no", "racks", 21, "found bool False"),
        ("topology: plain", "topology: 2024-02-03", None, 25, "found date"),
        ("      - 4\n", "      - 6\n", "racks", 15, "6 is not 2 times a power of two"),
    ],
)
def test_faults_are_told_with_their_line(old: str, new: str, name: str | None, line: int, words: str) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError) as caught:
        read_topology_yaml(TEXT.replace(old, new, 1), "topology.yaml", name)
    assert words in str(caught.value)
    assert f", line {line}: " in str(caught.value)


@pytest.mark.parametrize("text", ["", "a: 1", "[]", "- 3"])
def test_what_is_no_list_of_topologies_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"topology.yaml, line 1: .*expected"):
        read_topology_yaml(text, "topology.yaml")

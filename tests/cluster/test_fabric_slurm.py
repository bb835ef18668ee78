"""topology.conf and `scontrol show topology`: trees and blocks, and what Slurm or we would not accept."""

from __future__ import annotations

import pytest

from hpc_train.cluster.fabric_slurm import read_slurm_lines
from hpc_train.errors import ConfigError

TREE = """\
# The cluster, in any case
switchname=leaf1 NODES=n[1-2],gpu[1-2][1-2]  # a comment
SwitchName=leaf2 Nodes=n3,n4
SWITCHNAME=leaf3 nodes="n[5-6]" LinkSpeed=100

SwitchName=agg1 \\
    Switches=leaf[1-2]
SwitchName=agg2 Switches=leaf3
SwitchName=core Switches=agg[1-2]
"""
# Recorded with Slurm 22.05; the second form is printed by 24.11 (block plugin).
SCONTROL_TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=agg1 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=leaf[1-2]
SwitchName=core Level=2 LinkSpeed=1 Nodes=n[1-4] Switches=agg1
"""
SCONTROL_BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=n[01-04] BlockSize=4
BlockName=b2 BlockIndex=1 Nodes=n[05-08] BlockSize=4
BlockName=b3 BlockIndex=2 Nodes=n[09-12] BlockSize=4
AggregatedBlock=b[1-2] BlockIndex=3 Nodes=n[01-08] BlockSize=8
"""


def test_a_tree_of_three_tiers_with_comments_and_any_case() -> None:
    fabric = read_slurm_lines(TREE, "topology.conf")
    assert {name: node.leaves for name, node in fabric.nodes.items()} == {
        **dict.fromkeys(("n1", "n2", "gpu11", "gpu12", "gpu21", "gpu22"), ("leaf1",)),
        **dict.fromkeys(("n3", "n4"), ("leaf2",)),
        **dict.fromkeys(("n5", "n6"), ("leaf3",)),
    }
    assert fabric.pod_of_leaf == {"leaf1": "agg1", "leaf2": "agg1", "leaf3": "agg2"}
    assert fabric.core_of_pod == {"agg1": "core", "agg2": "core"}
    assert not fabric.are_rails_known
    assert fabric.notes == ("LinkSpeed has no unit in Slurm, so the speeds of links are not taken from it",)


def test_what_scontrol_repeats_on_upper_switches_is_not_taken_for_a_second_leaf() -> None:
    fabric = read_slurm_lines(SCONTROL_TREE, "scontrol")
    assert [node.leaves for node in fabric.nodes.values()] == [("leaf1",)] * 2 + [("leaf2",)] * 2
    assert fabric.notes == ()


def test_nodes_that_scontrol_repeats_on_a_switch_have_to_hang_on_a_leaf_below_it() -> None:
    wrong = SCONTROL_TREE.replace("Level=1 LinkSpeed=1 Nodes=n[1-4]", "Level=1 LinkSpeed=1 Nodes=n[1-9]")
    with pytest.raises(ConfigError, match=r"line 3: agg1 has n5 and 4 more below it, but none of the leaves below"):
        read_slurm_lines(wrong, "scontrol")
    other = SCONTROL_TREE + "SwitchName=leaf3 Level=0 Nodes=n5\nSwitchName=agg2 Level=1 Nodes=n[4-5] Switches=leaf3\n"
    with pytest.raises(ConfigError, match="line 6: agg2 has n4 below it"):
        read_slurm_lines(other, "scontrol")


@pytest.mark.parametrize("is_top_first", [False, True])
def test_switches_one_below_the_other_have_an_end(is_top_first: bool) -> None:
    def chain(length: int) -> str:
        lines = ["SwitchName=s0 Nodes=n[1-2]\n", *(f"SwitchName=s{i} Switches=s{i - 1}\n" for i in range(1, length))]
        return "".join(reversed(lines) if is_top_first else lines)

    assert read_slurm_lines(chain(64), "topology.conf").nodes["n1"].leaves == ("s0",)
    with pytest.raises(ConfigError, match=r"line \d+: below s\d+ are more than 63 switches"):
        read_slurm_lines(chain(3000), "topology.conf")


def test_several_roots_and_leaves_without_a_switch_above_are_told() -> None:
    text = "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\nSwitchName=top Switches=b\nSwitchName=empty\n"
    fabric = read_slurm_lines(text, "topology.conf")
    assert fabric.pod_of_leaf == {"a": "a", "b": "top"}
    assert fabric.core_of_pod == {}
    assert "2 parts that no switch joins" in fabric.notes[0]
    assert fabric.tier("n1", 0, "n2", 0) == "core"


def test_two_spines_that_share_their_leaves_are_one_pod() -> None:
    text = "SwitchName=l[1-2]\n" + "SwitchName=s[1-2] Switches=l[1-2]\n"
    with pytest.raises(ConfigError, match=r"line 2: s.1-2. are 2 switches with the same below them"):
        read_slurm_lines(text, "topology.conf")
    text = (
        "SwitchName=l1 Nodes=a\nSwitchName=l2 Nodes=b\nSwitchName=s1 Switches=l[1-2]\nSwitchName=s2 Switches=l[1-2]\n"
    )
    fabric = read_slurm_lines(text, "topology.conf")
    assert fabric.pod_of_leaf == {"l1": "s1,s2", "l2": "s1,s2"}
    assert fabric.tier("a", 0, "b", 0) == "spine"


def test_more_than_three_tiers_are_said_to_be_joined() -> None:
    text = TREE + "SwitchName=far Nodes=f1\nSwitchName=top Switches=core,far\n"
    fabric = read_slurm_lines(text, "topology.conf")
    assert any("4 tiers" in note for note in fabric.notes)
    assert fabric.core_of_pod == {"agg1": "top", "agg2": "top", "top": "top"}
    assert fabric.tier("n1", 0, "f1", 0) == "core"


def test_blocks_and_the_groups_that_scontrol_lists() -> None:
    fabric = read_slurm_lines(SCONTROL_BLOCKS, "scontrol")
    assert fabric.nodes["n06"].leaves == ("b2",)
    assert fabric.pod_of_leaf == {"b1": "blocks 0", "b2": "blocks 0", "b3": "blocks 1"}
    assert fabric.tier("n01", 0, "n05", 0) == "spine"
    assert fabric.tier("n01", 0, "n09", 0) == "core"
    plain = read_slurm_lines("BlockName=b1 Nodes=a\nBlockName=b2 Nodes=b\nBlockSizes=1\n", "topology.conf")
    assert (plain.tier("a", 0, "b", 0), plain.core_of_pod) == ("spine", {})
    assert "all blocks as one pod" in plain.notes[0]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("SwitchName=a Switches=b\nSwitchName=b Switches=c\nSwitchName=c Switches=a\n", 3, "loop.*: a -> b -> c -> a"),
        ("SwitchName=a Switches=a\n", 1, "loop.*a -> a"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Switches=a,x\n", 2, "the switch x below it, which is not described"),
        ("SwitchName=a Nodes=n[1-2]\n\nSwitchName=b Nodes=n[2-3]\n", 3, "node n2 is below b and, on line 1, below a"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n", 2, "a is described on line 1 already"),
        ("SwitchName=b Nodes=n2\nSwitchName=a Nodes=n1 Switches=b\n", 2, "has nodes and switches below it"),
        ("SwitchName=a Nodes=n[1-\n", 1, "never closed"),
        ("SwitchName=a Nodes=n1 Speed=3\n", 1, "Speed is not known"),
        ("SwitchName=a Nodes=n1 nodes=n2\n", 1, "Nodes is given twice"),
        ("SwitchName=a Nodes=n1 LinkSpeed=fast\n", 1, "LinkSpeed=fast is not a whole number"),
        ("SwitchName=a Nodes = n1 , n2\n", 1, "expected NAME=VALUE, found ', n2'"),
        ("Nodes=n1 SwitchName=a\n", 1, "a line begins with one of"),
        ("SwitchName=a BlockSize=3 Nodes=n1\n", 1, "BlockSize does not belong to SwitchName"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2\n", 2, "blocks and switches are mixed"),
        ("BlockName=b Nodes=n1\nBlockName=c Nodes=n1\n", 2, "n1 is in c and, on line 1, in b"),
        ("BlockName=b Nodes=n1\nBlockName=b Nodes=n2\n", 2, "b is described twice"),
        ("BlockSizes=4,x\n", 1, "is not a list of whole numbers"),
        (f"BlockSizes={'9' * 5000}\n", 1, "is not a list of whole numbers"),
        (f"SwitchName=a Nodes=n1 LinkSpeed={'9' * 5000}\n", 1, "LinkSpeed=9+ is not a whole number"),
        ("BlockName=b Nodes=n1\nBlockSizes=4,12\n", 2, "12 is not 4 times a power of two"),
        ("Include other.conf\n", 1, "expected NAME=VALUE"),
    ],
)
def test_faults_are_told_with_their_line(text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"topology.conf, line {line}: .*{words}"):
        read_slurm_lines(text, "topology.conf")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# nothing\n", "no switch and no block"),
        ("SwitchName=a\nSwitchName=b Switches=a\n", "no switch has nodes"),
    ],
)
def test_files_that_tell_nothing_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_slurm_lines(text, "topology.conf")

"""Which source is used, in which order, and what the user is told."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_train.cluster.fabric_find import find_fabric, read_sources
from hpc_train.cluster.fabric_node import NodeReport
from hpc_train.errors import ConfigError, LaunchError
from tests.launch.fakes import FakeCommands

CONF = "SwitchName=c1 Nodes=a,b\nSwitchName=c2 Nodes=d\nSwitchName=top Switches=c[1-2]\n"
SCONTROL = (
    "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=a\nSwitchName=s2 Level=0 LinkSpeed=1 Nodes=b,d\n"
    "SwitchName=top Level=1 LinkSpeed=1 Nodes=a,b,d Switches=s[1-2]\n"
)


def reports(*ways: str, pattern: str = "switch.switch.node") -> Sequence[NodeReport]:
    return [NodeReport(way.rpartition(".")[2], way, pattern) for way in ways]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Slurm without a topology from scontrol, and an empty folder of configuration."""
    fakes = FakeCommands(tmp_path / "bin")
    fakes.add("scontrol", err="scontrol: error\n", code=1)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/slurm.conf").touch()
    return {"PATH": fakes.path, "SLURM_CONF": str(tmp_path / "etc/slurm.conf"), "HOME": os.environ.get("HOME", "/")}


def scontrol_says(tmp_path: Path, text: str) -> None:
    FakeCommands(tmp_path / "bin").add("scontrol", text)


def leaf_of_a(env: dict[str, str], told: Sequence[NodeReport] = ()) -> tuple[str | None, str]:
    found = find_fabric(None, ["a", "b"], env, gather=lambda: told)
    return (None if found.fabric is None else found.fabric.nodes["a"].leaf(0)), "; ".join(found.notes)


def test_addresses_come_before_scontrol_and_scontrol_before_the_file(env: dict[str, str], tmp_path: Path) -> None:
    leaf, notes = leaf_of_a(env)
    assert leaf is None
    assert "no fabric is known, so ranks follow Slurm's order" in notes
    (tmp_path / "etc/topology.conf").write_text(CONF)
    leaf, notes = leaf_of_a(env)
    assert leaf == "c1"
    assert f"fabric from {tmp_path}/etc/topology.conf" in notes
    scontrol_says(tmp_path, SCONTROL)
    assert leaf_of_a(env) == ("s1", "fabric from scontrol show topology")
    assert leaf_of_a(env, reports("t.x.a", "t.x.b"))[0] == "x"
    assert leaf_of_a(env, reports("a", "b", pattern="node"))[0] == "s1"


def test_a_source_that_cannot_be_used_is_told_and_passed_over(env: dict[str, str], tmp_path: Path) -> None:
    scontrol_says(tmp_path, SCONTROL)
    leaf, notes = leaf_of_a(env, reports("t.x.a"))
    assert leaf == "s1"
    assert "SLURM_TOPOLOGY_ADDR cannot be used: b gave no answer" in notes
    scontrol_says(tmp_path, SCONTROL.replace("Nodes=a", "Nodes=c"))
    leaf, notes = leaf_of_a(env)
    assert leaf is None
    assert "a of the job's 2 nodes is not in the fabric of scontrol show topology" in notes
    scontrol_says(tmp_path, SCONTROL.replace("s[1-2]", "s[1-3]"))
    (tmp_path / "etc/topology.conf").write_text(CONF)
    leaf, notes = leaf_of_a(env)
    assert leaf == "c1"
    assert "scontrol show topology, line 3: top has the switch s3 below it" in notes


def test_where_slurm_s_configuration_is_not_there_scontrol_is_not_asked(env: dict[str, str], tmp_path: Path) -> None:
    """It would try for a minute, and its topology file may be there all the same."""
    (tmp_path / "bin/scontrol").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    (tmp_path / "etc/slurm.conf").unlink()
    leaf, notes = leaf_of_a({**env, "SLURM_JOB_PARTITION": "gpu"})
    assert leaf is None and not (tmp_path / "asked").exists()
    said = f"scontrol show topology cannot be used: SLURM_CONF={tmp_path}/etc/slurm.conf cannot be read (No such file"
    assert said in notes
    (tmp_path / "etc/topology.yaml").write_text("- topology: t\n  tree: {switches: [{switch: w1, nodes: 'a,b'}]}\n")
    assert leaf_of_a({**env, "SLURM_JOB_PARTITION": "gpu"})[0] == "w1"
    assert not (tmp_path / "asked").exists()


def test_nodes_that_cannot_be_asked_are_told(env: dict[str, str], tmp_path: Path) -> None:
    scontrol_says(tmp_path, SCONTROL)

    def fails() -> Sequence[NodeReport]:
        raise LaunchError("no answer in 120 s")

    found = find_fabric(None, ["a"], env, gather=fails)
    assert found.notes[0] == "the nodes could not be asked about the fabric: no answer in 120 s"
    assert found.fabric is not None


def test_the_topology_of_the_job_s_partition_is_taken(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "etc/topology.yaml").write_text(
        "- topology: one\n  cluster_default: true\n  tree: {switches: [{switch: w1, nodes: 'a,b'}]}\n"
        "- topology: two\n  tree: {switches: [{switch: w2, nodes: 'a,b'}]}\n"
    )
    (tmp_path / "etc/topology.conf").write_text(CONF)
    assert leaf_of_a(env)[0] == "w1"
    program = 'if [ "$2" = partition ]; then echo "PartitionName=$3 Topology=two"; else exit 1; fi'
    (tmp_path / "bin/scontrol").write_text(f"#!/bin/sh\n{program}\n")
    assert leaf_of_a({**env, "SLURM_JOB_PARTITION": "gpu"})[0] == "w2"


def test_a_named_source_has_to_hold_every_node(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "my.conf"
    path.write_text(CONF)
    assert find_fabric(str(path), ["a", "d"], env).fabric is not None
    with pytest.raises(ConfigError, match=r"x1, x2, x3, x4 and 1 more of the job's 6 nodes are not in the fabric of"):
        find_fabric(str(path), ["a", "x1", "x2", "x3", "x4", "x5"], env)


def test_gpu_counts_that_a_named_source_does_not_have_are_refused(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "fabric.yaml"
    path.write_text("version: 1\nnum_gpus: 4\npods: {p: {leaves: {l: {nodes: 'a,b'}}}}\n")
    assert find_fabric(str(path), ["a"], env, gpus={"a": 4}).fabric is not None
    with pytest.raises(ConfigError, match=r"fewer GPUs than the job: a \(8 by Slurm, 4 by .*Bring .* up to date"):
        find_fabric(str(path), ["a"], env, gpus={"a": 8})


def test_files_of_all_forms_are_told_apart_and_merged(tmp_path: Path) -> None:
    texts = {
        "ours.yaml": "version: 1\nnum_gpus: 2\npods: {p: {leaves: {l: {nodes: 'a,b,d'}}}}\n",
        "topology.conf": CONF,
        "scontrol.txt": SCONTROL,
        "topology.yaml": "- topology: t\n  tree: {switches: [{switch: w1, nodes: 'a,b,d'}]}\n"
        "- topology: f\n  flat: true\n",
        "other.txt": "hello\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert read_sources(f"{tmp_path}/scontrol.txt").nodes["a"].leaves == ("s1",)
    assert read_sources(f"{tmp_path}/topology.yaml#t").nodes["a"].leaves == ("w1",)
    merged = read_sources(f"{tmp_path}/topology.conf, {tmp_path}/ours.yaml")
    assert (merged.nodes["a"].leaves, merged.nodes["a"].num_gpus) == (("c1",), 2)
    assert any("share their leaf by" in note for note in merged.notes)
    for name, words in (
        ("other.txt", "is none of these"),
        ("topology.yaml#f", "this topology is flat"),
        ("topology.conf#f", "is no topology.yaml"),
        ("missing", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_sources(f"{tmp_path}/{name}")
    assert len(read_sources("clos:pods=2,nodes=4").nodes) == 8
    for number in ("9" * 5000, "0", "1000001"):
        with pytest.raises(ConfigError, match="is not a whole number from 1 to 1000000"):
            read_sources(f"clos:pods=2,nodes={number}")


def test_a_byte_order_mark_is_passed_over_and_other_encodings_are_told_with_their_line(
    env: dict[str, str], tmp_path: Path
) -> None:
    ours = "version: 1\nnum_gpus: 2\npods: {p: {leaves: {l: {nodes: 'a,b,d'}}}}\n"
    for name, text in (("ours.yaml", ours), ("topology.conf", CONF), ("t.yaml", "- topology: f\n  flat: true\n")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert "a" in read_sources(f"{tmp_path}/ours.yaml").nodes
    assert "a" in read_sources(f"{tmp_path}/topology.conf").nodes
    with pytest.raises(ConfigError, match="this topology is flat"):
        read_sources(f"{tmp_path}/t.yaml")
    (tmp_path / "latin.conf").write_bytes(CONF.encode() + b"# caf\xe9\n")
    line = CONF.count("\n") + 1
    with pytest.raises(ConfigError, match=rf"latin\.conf, line {line}: not UTF-8: the byte 0xe9"):
        read_sources(f"{tmp_path}/latin.conf")

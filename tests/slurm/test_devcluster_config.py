"""The texts and addresses of slurm/devcluster: pure, so no root and no Slurm."""

from __future__ import annotations

import ipaddress
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "slurm"))
from _devcluster import layout as texts
from _devcluster.layout import Layout
from _devcluster.machine import what_is_lacking

STATE = "/state"

layouts = st.builds(
    Layout,
    name=st.from_regex(r"[a-z][a-z0-9-]{0,19}", fullmatch=True),
    num_nodes=st.integers(1, 60),
    gpus_per_node=st.integers(0, 16),
    cpus_per_node=st.integers(1, 256),
    nodes_per_leaf=st.integers(1, 9),
    leaves_per_agg=st.integers(1, 9),
    subnet=st.sampled_from(["10.77.0.0/24", "10.0.0.192/26", "192.168.4.0/22", "172.16.0.0/16"]),
)


@given(layouts)
def test_every_host_and_this_machine_have_addresses_of_their_own_inside_the_subnet(layout: Layout) -> None:
    addresses = [layout.address(host) for host in layout.hosts] + [layout.machine_address]
    assert len(set(addresses)) == len(addresses) == layout.num_nodes + 2
    network = layout.network
    for address in map(ipaddress.IPv4Address, addresses):
        assert address in network
        assert address not in (network.network_address, network.broadcast_address)


@given(layouts)
def test_each_node_is_under_one_leaf_each_leaf_under_one_aggregation_switch_and_all_under_the_core(
    layout: Layout,
) -> None:
    switches = {}
    for line in texts.topology_text(layout).splitlines():
        name, kind, below = re.fullmatch(r"SwitchName=(\w+) (Nodes|Switches)=([\w,]+)", line).groups()
        switches[name] = (kind, below.split(","))
    nodes = [node for kind, below in switches.values() if kind == "Nodes" for node in below]
    assert nodes == list(layout.nodes)
    leaves = [leaf for name, (_, below) in switches.items() if name.startswith("agg") for leaf in below]
    assert leaves == [name for name in switches if name.startswith("leaf")]
    assert switches["core"][1] == [name for name in switches if name.startswith("agg")]
    for name, (kind, below) in switches.items():
        if name != "core":
            assert 1 <= len(below) <= (layout.nodes_per_leaf if kind == "Nodes" else layout.leaves_per_agg)
    for node in layout.nodes:
        assert node in switches[layout.leaf_of(node)][1]


@given(layouts)
def test_interface_and_namespace_names_fit_and_tell_clusters_apart(layout: Layout) -> None:
    assert len(layout.link) <= 15
    assert layout.link != texts.link_name(layout.name + "x")
    assert not layout.namespace("n1").startswith(texts.namespace_prefix(layout.name + "x"))


def test_the_default_is_eight_nodes_of_eight_gpus_in_three_tiers() -> None:
    layout = Layout()
    assert texts.topology_text(layout) == (
        "SwitchName=leaf1 Nodes=n1,n2\n"
        "SwitchName=leaf2 Nodes=n3,n4\n"
        "SwitchName=leaf3 Nodes=n5,n6\n"
        "SwitchName=leaf4 Nodes=n7,n8\n"
        "SwitchName=agg1 Switches=leaf1,leaf2\n"
        "SwitchName=agg2 Switches=leaf3,leaf4\n"
        "SwitchName=core Switches=agg1,agg2\n"
    )
    assert layout.address("n3") == "10.77.0.3"
    assert layout.address("login") == "10.77.0.253"
    assert layout.machine_address == "10.77.0.254"


def test_hosts_name_all_hosts_and_this_machine_and_no_name_twice() -> None:
    layout = Layout(num_nodes=2)
    assert texts.hosts_text(layout, "laptop").splitlines()[2:] == [
        "10.77.0.253 login",
        "10.77.0.1 n1",
        "10.77.0.2 n2",
        "10.77.0.254 laptop",
    ]
    for taken in ("n1", "login", "localhost"):
        names = [name for line in texts.hosts_text(layout, taken).splitlines() for name in line.split()[1:]]
        assert names.count(taken) == (2 if taken == "localhost" else 1)


def test_slurm_conf_places_each_node_at_its_own_address() -> None:
    layout = Layout(num_nodes=2, gpus_per_node=4, cpus_per_node=16, subnet="10.9.8.0/28")
    lines = texts.slurm_conf_text(layout, STATE, mpi_default="pmix").splitlines()
    assert [line for line in lines if line.startswith("NodeName=")] == [
        "NodeName=n1 NodeAddr=10.9.8.1 CPUs=16 RealMemory=512000 Gres=gpu:4 State=UNKNOWN",
        "NodeName=n2 NodeAddr=10.9.8.2 CPUs=16 RealMemory=512000 Gres=gpu:4 State=UNKNOWN",
    ]
    assert "SlurmctldHost=login(10.9.8.13)" in lines
    assert "AuthInfo=socket=/state/munge/socket,cred_expire=5" in lines
    assert "MpiDefault=pmix" in lines
    assert "TmpFS=/state/nodes/%n/tmp" in lines


@given(layouts)
def test_slurm_conf_names_no_key_twice(layout: Layout) -> None:
    keys = [
        line.split("=")[0]
        for line in texts.slurm_conf_text(layout, STATE, mpi_default="none").splitlines()
        if "=" in line and not line.startswith(("#", "NodeName", "PartitionName"))
    ]
    assert len(keys) == len(set(keys))


def test_gres_conf_has_a_device_for_each_gpu() -> None:
    assert texts.gres_text(Layout(gpus_per_node=8), STATE) == "Name=gpu File=/state/gpu/gpu[0-7]\n"
    assert texts.gres_text(Layout(gpus_per_node=1), STATE) == "Name=gpu File=/state/gpu/gpu0\n"


def test_no_gpus_means_no_word_of_gpus() -> None:
    layout = Layout(gpus_per_node=0)
    assert texts.gres_text(layout, STATE) == ""
    assert "gres" not in texts.slurm_conf_text(layout, STATE, mpi_default="none").lower()


def test_cgroups_are_switched_off_where_slurm_knows_how() -> None:
    assert texts.cgroup_text((22, 5)) == ""
    assert texts.cgroup_text((24, 11)) == "CgroupPlugin=disabled\n"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": "Dev"}, "--name 'Dev'"),
        ({"name": "a.b"}, "--name 'a.b'"),
        ({"name": "../x"}, "--name '../x'"),
        ({"name": "x" * 21}, "up to 20"),
        ({"num_nodes": 0}, "--nodes 0 is too small. Use 1 or more."),
        ({"gpus_per_node": -1}, "--gpus -1 is too small. Use 0 or more."),
        ({"cpus_per_node": 0}, "--cpus 0"),
        ({"nodes_per_leaf": 0}, "--nodes-per-leaf 0"),
        ({"leaves_per_agg": 0}, "--leaves-per-agg 0"),
        ({"num_nodes": 253}, "10.77.0.0/24 has room for 252 nodes, and 253 were asked for"),
        ({"subnet": "10.77.0.1/24"}, "--subnet 10.77.0.1/24"),
        ({"subnet": "ten"}, "--subnet ten"),
        ({"subnet": "10.0.0.0/31"}, "room for 0 nodes"),
    ],
)
def test_a_layout_that_cannot_be_built_is_refused_with_what_can(wrong: dict, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Layout(**wrong)


def test_the_largest_cluster_of_a_subnet_fills_it() -> None:
    layout = Layout(num_nodes=252)
    assert ipaddress.IPv4Address(layout.address("n252")) + 1 == ipaddress.IPv4Address(layout.address("login"))


def test_missing_programs_are_named_with_the_one_command_that_brings_them() -> None:
    assert what_is_lacking(lambda program: "/" + program, is_root=True) == []
    without = {"slurmctld", "slurmd", "munged"}
    assert what_is_lacking(lambda program: None if program in without else program, is_root=True) == [
        "slurmctld, slurmd, munged not found; as root: apt-get install -y slurm-wlm libpmix-dev munge"
    ]


def test_without_root_it_says_what_for_and_how_to_get_it() -> None:
    (problem,) = what_is_lacking(lambda program: program, is_root=False)
    assert "not root" in problem
    assert "sudo" in problem

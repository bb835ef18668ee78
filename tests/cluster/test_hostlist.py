from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.cluster.hostlist import compress_hostlist, expand_hostlist, natural_order, parse_tasks_per_node
from hpc_train.errors import LaunchError

# What Slurm 22.05 answers.
ACCEPTED = {
    "a[1-2]b[03-05]": "a1b03 a1b04 a1b05 a2b03 a2b04 a2b05",
    "a[1-2][3-4]": "a13 a14 a23 a24",
    "n[1-2][3-4][5-6]": "n135 n136 n235 n236 n145 n146 n245 n246",
    "n[08-11]": "n08 n09 n10 n11",
    "n[8-11]": "n8 n9 n10 n11",
    "n[099-101]": "n099 n100 n101",
    "n[001-003,010]": "n001 n002 n003 n010",
    "n[3,1,2]": "n3 n1 n2",
    "n[1,1]": "n1 n1",
    "n[1-1]": "n1",
    "n[1-2],n[01-02]": "n1 n2 n01 n02",
    "n[1-02]": "n1 n2",
    "n[001-2]": "n001 n002",
    "x,y[001,003],z": "x y001 y003 z",
    "ab1c-s[11,17]": "ab1c-s11 ab1c-s17",
    "k-ia[810,817-819]": "k-ia810 k-ia817 k-ia818 k-ia819",
    "gpu-07": "gpu-07",
    "[1-3]": "1 2 3",
    "host[1-2],": "host1 host2",
    "a,,b": "a b",
    "n1-ib,n2-ib": "n1-ib n2-ib",
    "rack[0-1]b[0-1]": "rack0b0 rack0b1 rack1b0 rack1b1",
    "foo-[10-11]-[01-02]": "foo-10-01 foo-10-02 foo-11-01 foo-11-02",
    "foo-m11-16": "foo-m11-16",
    "c[1-2]": "c1 c2",
    "n1.example": "n1.example",
}
REJECTED = [
    "n[1-2]-ib0",
    "n[1-3]x,n[5-6]y",
    "n[2-3].dom",
    "n[2-1]",
    "n[]",
    "n[a-c]",
    "n[0-3:2]",
    "n[1,,2]",
    "n[1-65537]",
    "n[[1-2]]",
    "n[1-2]]",
    "a[1-2]b[1-2]c",
]
# Slurm takes these and makes bogus names of them, with exit status 0.
REFUSED_BY_US = ["n[1-2", "???[", "n]", "a b", "n*", "n{1,2}", "n[1-]", "n[ 1-2]", "", ",", "n\n1"]


@pytest.mark.parametrize(("text", "hosts"), ACCEPTED.items())
def test_host_lists_expand_as_slurm_expands_them(text: str, hosts: str) -> None:
    """FC-14"""
    assert expand_hostlist(text) == tuple(hosts.split())


@pytest.mark.parametrize("text", REJECTED + REFUSED_BY_US)
def test_a_host_list_of_unknown_shape_is_refused_and_never_one_node(text: str) -> None:
    """FC-14"""
    with pytest.raises(LaunchError, match="host list"):
        expand_hostlist(text)


def test_a_list_of_billions_of_hosts_is_refused_without_being_built() -> None:
    with pytest.raises(LaunchError, match="names"):
        expand_hostlist("a[1-65536]b[1-65536]c[1-65536]")


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="no scontrol here")
def test_the_accepted_lists_are_those_of_the_installed_scontrol(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = tmp_path / "slurm.conf"
    config.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=x\n")
    for text, hosts in list(ACCEPTED.items())[:6]:
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", text],
            env={"SLURM_CONF": str(config), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        if answer.returncode != 0:
            pytest.skip(f"scontrol does not work here: {answer.stderr.strip()}")
        assert answer.stdout.split() == hosts.split()


_NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,6}[0-9]{0,5}", fullmatch=True)
_SERIES = st.builds(
    lambda prefix, low, count, width: [f"{prefix}{number:0{width}}" for number in range(low, low + count)],
    st.sampled_from(["n", "gpu-", "r1b", "x.y", ""]),
    st.integers(0, 1200),
    st.integers(1, 12),
    st.integers(0, 5),
)


@given(st.lists(st.one_of(_NAMES.map(lambda name: [name]), _SERIES), min_size=1, max_size=6))
def test_a_compressed_list_expands_to_the_same_names_in_the_same_order(parts: list[list[str]]) -> None:
    hosts = [host for part in parts for host in part]
    assert expand_hostlist(compress_hostlist(hosts)) == tuple(hosts)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("n1 n2 n3", "n[1-3]"),
        ("n08 n09 n10", "n[08-10]"),
        ("n1 n2 n01", "n[1-2,01]"),
        ("a n7", "a,n7"),
        ("n3 n1 n2", "n[3,1-2]"),
        ("a1b03 a1b04 a2b03", "a1b[03-04],a2b03"),
    ],
)
def test_compression_writes_what_slurm_would(hosts: str, text: str) -> None:
    assert compress_hostlist(hosts.split()) == text


def test_compression_refuses_what_is_no_host_name() -> None:
    for name in ("", "n[1-2]", "a,b", "a b"):
        with pytest.raises(LaunchError, match="not a host name"):
            compress_hostlist([name])


@pytest.mark.parametrize(
    ("text", "num_nodes", "counts"),
    [
        ("1(x2)", 2, (1, 1)),
        ("4,1(x3)", 4, (4, 1, 1, 1)),
        ("2,1,2", 3, (2, 1, 2)),
        ("8", 1, (8,)),
        ("4(x2),3", 3, (4, 4, 3)),
    ],
)
def test_a_compressed_count_list_gives_one_count_a_node(text: str, num_nodes: int, counts: tuple[int, ...]) -> None:
    """FC-04"""
    assert parse_tasks_per_node(text, num_nodes) == counts


@pytest.mark.parametrize(
    ("text", "num_nodes"),
    [("4(x3)", 2), ("2(x0)", 1), ("2(x)", 1), ("", 1), ("0", 1), ("-1", 1), ("a", 1), ("1,", 1), ("1(x99999999)", 1)],
)
def test_a_count_list_that_is_malformed_or_of_another_length_is_refused(text: str, num_nodes: int) -> None:
    """FC-04"""
    with pytest.raises(LaunchError, match="count list"):
        parse_tasks_per_node(text, num_nodes)


def test_numbers_in_names_sort_by_their_value() -> None:
    assert sorted(["n10", "n2", "a9-b10", "a9-b9"], key=natural_order) == ["a9-b9", "a9-b10", "n2", "n10"]

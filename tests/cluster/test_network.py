from __future__ import annotations

import pytest

from hpc_train.cluster.network import (
    Interface,
    advertised_address,
    common_interfaces,
    list_interfaces,
    match_interfaces,
    preset_address,
)
from hpc_train.errors import LaunchError

NAMES = ("lo", "eth0", "eth1", "ib0", "bond0", "bond0.2.1", "docker0")


def table(**addresses: str | None) -> dict[str, Interface]:
    """Build a table of interfaces with a mask of 24 bits; a trailing '!' means down."""
    return {
        name: Interface(
            name,
            address.rstrip("!") if address else None,
            "255.255.255.0" if address else None,
            not (address or "").endswith("!"),
        )
        for name, address in addresses.items()
    }


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("eth", "eth0 eth1"),
        ("eth,ib", "eth0 eth1 ib0"),
        ("bond0", "bond0 bond0.2.1"),
        ("=bond0", "bond0"),
        ("=eth0,ib0", "eth0 ib0"),
        ("^docker0", "lo eth0 eth1 ib0 bond0 bond0.2.1"),
        ("^docker,lo", "eth0 eth1 ib0 bond0 bond0.2.1"),
        ("^=bond0", "lo eth0 eth1 ib0 bond0.2.1 docker0"),
        ("hsn", ""),
        ("", " ".join(NAMES)),
    ],
)
def test_interface_patterns_match_as_nccls_do(pattern: str, matched: str) -> None:
    """FC-11: prefix list, `=` exact, `^` exclude; a lone exclusion admits loopback again."""
    assert match_interfaces(pattern, NAMES) == tuple(matched.split())


def test_a_chosen_interface_gives_its_address() -> None:
    """FC-11"""
    interfaces = table(lo="127.0.0.1", eth0="10.0.0.5", ib0="10.1.0.5")
    assert advertised_address("n1", "ib", 2, interfaces=interfaces) == "10.1.0.5"
    assert advertised_address("n1", "^eth", 2, interfaces=interfaces) == "10.1.0.5"


@pytest.mark.parametrize(
    ("pattern", "interfaces", "words"),
    [
        ("ib0", table(lo="127.0.0.1", ib0=None), "ib0 without address"),
        ("ib0", table(ib0="10.1.0.5!"), "down"),
        ("ib0", table(eth0="10.0.0.5"), "matches no interface"),
        ("lo", table(lo="127.0.0.1"), "loopback"),
    ],
)
def test_an_interface_that_cannot_be_used_is_refused_with_what_there_is(
    pattern: str, interfaces: dict[str, Interface], words: str
) -> None:
    """FC-11"""
    with pytest.raises(LaunchError, match=words):
        advertised_address("n1", pattern, 2, interfaces=interfaces)


def test_a_host_name_on_loopback_is_refused_on_several_nodes_and_accepted_on_one() -> None:
    """FC-12"""
    with pytest.raises(LaunchError, match=r"`127.0.1.1 n1` in /etc/hosts.*launch.interface"):
        advertised_address("n1", num_nodes=2, resolve=lambda name: "127.0.1.1")
    assert advertised_address("n1", num_nodes=1, resolve=lambda name: "127.0.1.1") == "127.0.1.1"


def test_a_name_that_does_not_resolve_is_refused() -> None:
    def resolve(name: str) -> str:
        raise OSError("unknown host")

    with pytest.raises(LaunchError, match="n1 does not resolve"):
        advertised_address("n1", num_nodes=2, resolve=resolve)


def test_an_address_template_gives_the_name_on_the_fabric() -> None:
    """FC-49"""
    known = {"n1i": "10.1.0.5", "n1": "10.0.0.5"}
    address = advertised_address("n1", num_nodes=2, template="{host}i", resolve=known.__getitem__)
    assert address == "10.1.0.5"
    with pytest.raises(LaunchError, match="one name"):
        advertised_address("n1", num_nodes=2, template="n1i", resolve=known.__getitem__)


def test_a_preset_master_address_is_respected() -> None:
    """FC-49"""
    assert preset_address({}) is None
    assert preset_address({"MASTER_ADDR": "n1i"}) == ("n1i", None)
    assert preset_address({"MASTER_ADDR": "n1i", "MASTER_PORT": "29500"}) == ("n1i", 29500)
    held = {"MASTER_ADDR": "n1i", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert preset_address(held) == ("n1i", None), "somebody else listens there"
    with pytest.raises(LaunchError, match="MASTER_PORT='0'"):
        preset_address({"MASTER_ADDR": "n1i", "MASTER_PORT": "0"})


def test_networks_that_all_nodes_share_with_rank_0_are_kept_under_each_nodes_own_names() -> None:
    """FC-11: names differ between nodes, docker is on every node but is not one network with a name each."""
    tables = [
        table(lo="127.0.0.1", eth0="10.0.0.1", ib0="10.1.0.1"),
        table(lo="127.0.0.1", eno1="10.0.0.2", ib1="10.1.0.2"),
        table(lo="127.0.0.1", eth0="10.0.0.3!", ib0="10.1.0.3"),
    ]
    found = common_interfaces(tables)
    assert [(str(item.network), item.names) for item in found] == [("10.1.0.0/24", ("ib0", "ib1", "ib0"))]


def test_nodes_without_a_common_network_are_refused_with_their_interfaces() -> None:
    """FC-11"""
    tables = [table(eth0="10.0.0.1", ib0=None), table(eth0="10.9.0.2")]
    with pytest.raises(LaunchError, match=r"n1: eth0 10.0.0.1, ib0 without address; n2: eth0 10.9.0.2"):
        common_interfaces(tables, hosts=["n1", "n2"])


def test_this_machines_interfaces_are_listed_with_loopback() -> None:
    interfaces = list_interfaces()
    assert interfaces["lo"].address == "127.0.0.1" and interfaces["lo"].is_loopback
    assert str(interfaces["lo"].network) == "127.0.0.0/8"

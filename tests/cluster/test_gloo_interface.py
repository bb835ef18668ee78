"""Which interface gloo is told, by what the host name resolves to."""

from __future__ import annotations

import socket

import pytest

from hpc_train.cluster.gloo_interface import address_towards, gloo_interface, told_interfaces
from hpc_train.errors import LaunchError
from tests.cluster.test_network import table

INTERFACES = table(lo="127.0.0.1", eth0="10.0.0.5", ib0="10.1.0.5")
OWN = {"10.0.0.5", "10.1.0.5"}


def chosen(names: dict[str, str], address: str = "10.0.0.5", *, is_chosen: bool = False) -> tuple[str, str] | None:
    def resolve(name: str) -> str:
        if name not in names:
            raise socket.gaierror(-2, "Name or service not known")
        return names[name]

    found = gloo_interface(
        "n1", address, is_chosen=is_chosen, resolve=resolve, is_own=OWN.__contains__, interfaces=INTERFACES
    )
    return None if found is None else (found.name, found.reason)


def test_gloo_is_told_nothing_where_the_host_name_is_an_address_of_this_node() -> None:
    """Also one that is not an interface's first address."""
    assert chosen({"n1": "10.0.0.5"}) is None
    assert chosen({"n1": "10.1.0.5"}, "10.0.0.99") is None


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({}, "the host name n1 does not resolve on its own node (Name or service not known)"),
        ({"n1": "127.0.1.1"}, "the host name n1 resolves to 127.0.1.1 on its own node"),
        ({"n1": "10.9.0.9"}, "the host name n1 resolves to 10.9.0.9, which is not this node's"),
    ],
)
def test_where_the_host_name_gives_nothing_gloo_is_told_the_interface_of_the_known_address(
    names: dict[str, str], reason: str
) -> None:
    """FC-12. gloo itself would take loopback without a word, and other nodes would call themselves."""
    assert chosen(names) == ("eth0", reason)
    assert chosen(names, "10.1.0.5") == ("ib0", reason)


def test_an_interface_that_the_user_named_is_told_whatever_the_host_name_says() -> None:
    assert chosen({"n1": "10.0.0.5"}, "10.1.0.5", is_chosen=True) == ("ib0", "launch.interface names it")


@pytest.mark.parametrize("address", ["10.0.0.99", "127.0.0.1"])
def test_a_host_that_no_interface_can_be_found_for_is_refused_with_what_to_set(address: str) -> None:
    with pytest.raises(LaunchError) as refusal:
        chosen({"n1": "127.0.1.1"}, address)
    for words in ("host name n1 resolves to 127.0.1.1", f"has {address}", "ib0 10.1.0.5", "launch.interface=NAME"):
        assert words in str(refusal.value)


def test_interfaces_that_were_told_are_read_and_the_way_to_this_machine_is_its_own_address() -> None:
    assert told_interfaces({}) == told_interfaces({"GLOO_SOCKET_IFNAME": ""}) == ()
    assert told_interfaces({"GLOO_SOCKET_IFNAME": "eth0,ib0"}) == ("eth0", "ib0")
    assert address_towards("127.0.0.1") == "127.0.0.1"

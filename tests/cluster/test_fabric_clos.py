"""Synthetic fabrics."""

from __future__ import annotations

from collections import Counter

import pytest

from hpc_train.cluster.fabric_clos import clos_fabric
from hpc_train.errors import ConfigError


def test_every_rail_of_a_run_of_nodes_has_a_leaf_of_its_own() -> None:
    fabric = clos_fabric("clos:pods=2,nodes=40,ports=64")
    assert len(fabric.nodes) == 80
    assert len(fabric.pod_of_leaf) == 2 * 2 * 8
    for rail in range(8):
        assert Counter(node.leaf(rail) for node in fabric.nodes.values()) == {
            f"pod{pod}.leaf{group}.rail{rail}": count for pod in (0, 1) for group, count in ((0, 32), (1, 8))
        }
    assert fabric.tier("n00", 3, "n31", 3) == "leaf"
    assert fabric.tier("n00", 3, "n31", 4) == "spine"
    assert fabric.tier("n00", 3, "n32", 3) == "spine"
    assert fabric.tier("n00", 3, "n40", 3) == "core"


def test_oversubscription_sets_the_ports_and_the_price_of_a_hop() -> None:
    fabric = clos_fabric("clos:pods=2,nodes=48,ports=64,spine_oversubscription=3,core_oversubscription=2,gbps=200")
    assert set(fabric.leaf_uplinks.values()) == {16}
    assert fabric.pod_uplinks == {"pod0": 64, "pod1": 64}
    assert fabric.hop_weights == {"node": 0, "leaf": 1000, "spine": 9000, "core": 10000}
    assert fabric.link_bytes_per_s["leaf"] == 25_000_000_000


def test_gpus_share_the_rails_that_are_there() -> None:
    node = clos_fabric("clos:pods=1,nodes=1,gpus=8,rails=4").nodes["n0"]
    assert [node.rail(gpu) for gpu in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_shuffled_names_are_the_same_for_a_seed_and_do_not_follow_the_switches() -> None:
    first, second, other = (clos_fabric(f"clos:pods=2,nodes=64,shuffle={seed}") for seed in (1, 1, 2))
    assert list(first.nodes) == list(second.nodes) != list(other.nodes)
    assert set(first.nodes) == set(other.nodes)
    assert list(first.nodes) != sorted(first.nodes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clos:pods=2", "nodes= is missing"),
        ("clos:pods=2,nodes=4,speed=3", "'speed=3' is not a setting"),
        ("clos:pods=2,nodes=4,pods=3", "pods is given twice"),
        ("clos:pods=0,nodes=4", "pods=0 is not a whole number"),
        ("clos:pods=2,nodes=four", "nodes=four"),
        ("clos:pods=2,nodes=4,rails=3", "cannot share rails=3"),
        ("clos:pods=2,nodes=4,ports=1", "0 down and 1 up"),
        ("clos:pods=2,nodes=4,core_oversubscription=0.5", "is not a ratio"),
        ("clos:pods=2,nodes=4,shuffle=x", "shuffle=x"),
        ("clos:pods=100000,nodes=1000", "more than a million"),
        ("clos:", "'' is not a setting"),
    ],
)
def test_settings_that_fit_nothing_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="clos:") as caught:
        clos_fabric(text)
    assert words in str(caught.value)

"""The real ibnetdiscover on simulated fabrics (ibsim), and outputs that are damaged or contradict themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpc_train.cluster.fabric import Fabric
from hpc_train.cluster.fabric_infiniband import read_ibnetdiscover
from hpc_train.errors import ConfigError
from tests.services.ib_fabric import Network, discover, missing_programs, node_name, simulated, three_tiers

needs_ibsim = pytest.mark.skipif(
    bool(missing_programs()), reason=f"no {', '.join(missing_programs())} (env/setup_system.sh)"
)


def look_at(net: Network, **settings: object) -> Fabric:
    with simulated(net) as env:
        return read_ibnetdiscover(discover(env), "ibnetdiscover", **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def three_tier_text() -> Iterator[str]:
    if missing_programs():
        pytest.skip("no ibsim")
    with simulated(three_tiers(pods=2, leaves=2, nodes=3, rails=8)) as env:
        yield discover(env)


@needs_ibsim
def test_three_tiers_with_eight_rails_are_found_as_they_are_cabled(three_tier_text: str) -> None:
    fabric = read_ibnetdiscover(three_tier_text, "ibnetdiscover")
    for pod in (0, 1):
        for group in (0, 1):
            for node in range(3):
                found = fabric.nodes[node_name(pod, group, node)]
                assert found.leaves == tuple(f"pod{pod} leaf{group} rail{rail}" for rail in range(8))
    assert len(fabric.nodes) == 12
    assert len(fabric.pod_of_leaf) == 32
    assert sorted(set(fabric.pod_of_leaf.values())) == ["pod0 spine0,pod0 spine1", "pod1 spine0,pod1 spine1"]
    assert set(fabric.core_of_pod.values()) == {"core0,core1"}
    here = node_name(0, 0, 0)
    tiers = [fabric.tier(here, 5, node_name(*place), 5) for place in ((0, 0, 1), (0, 1, 0), (1, 0, 0))]
    assert tiers == ["leaf", "spine", "core"]
    assert fabric.tier(here, 5, node_name(0, 0, 1), 6) == "spine"
    # 3 cards down and 2 links up at a leaf; 16 leaves with 2 links each, and 4 links to the cores.
    assert (fabric.spine_oversubscription, fabric.core_oversubscription) == (1.5, 8.0)
    assert set(fabric.leaf_uplinks.values()) == {2}
    assert set(fabric.pod_uplinks.values()) == {4}
    # ibsim's links are 4xSDR: 8 Gb/s of data.
    assert fabric.link_bytes_per_s == dict.fromkeys(("leaf", "spine", "core"), 10**9)
    assert fabric.rail_nics == tuple(f"mlx5_{rail}" for rail in range(8))
    assert not fabric.are_rails_known


@needs_ibsim
def test_links_that_are_down_are_missed_and_counted() -> None:
    net = three_tiers(pods=1, leaves=2, nodes=2, rails=2)
    net.cut(f"{node_name(0, 0, 1)} mlx5_1", "pod0 leaf0 rail1")
    net.cut("pod0 leaf1 rail0", "pod0 spine1")
    fabric = look_at(net)
    assert fabric.nodes[node_name(0, 0, 1)].leaves == ("pod0 leaf0 rail0", None)
    assert fabric.leaf_uplinks["pod0 leaf1 rail0"] == 1
    assert "1 of 4 nodes have no link by mlx5_1" in fabric.notes
    assert fabric.core_of_pod == {}


@needs_ibsim
def test_hosts_that_are_no_nodes_and_cards_that_are_no_rails_are_left_out() -> None:
    """A storage server on a spine makes it look like a leaf, until the nodes are named."""
    net = three_tiers(pods=2, leaves=1, nodes=2, rails=2)
    net.add("Hca", "store1 mlx5_0", 2)
    net.join("store1 mlx5_0", "pod0 spine0")
    net.add("Hca", "Mellanox Technologies Aggregation Node", 1)
    net.join("Mellanox Technologies Aggregation Node", "core0")
    net.add("Hca", f"{node_name(0, 0, 0)} mlx5_9", 1)
    net.join(f"{node_name(0, 0, 0)} mlx5_9", "pod1 spine0")
    nodes = [node_name(pod, 0, node) for pod in (0, 1) for node in (0, 1)]
    with simulated(net) as env:
        text = discover(env)
    with pytest.raises(ConfigError, match="are both 0 links away from the nodes and linked to each other"):
        read_ibnetdiscover(text, "ib")
    fabric = read_ibnetdiscover(text, "ib", nodes=nodes, cards=("mlx5_0", "mlx5_1"))
    assert sorted(fabric.nodes) == sorted(nodes)
    assert fabric.nodes[nodes[0]].leaves == ("pod0 leaf0 rail0", "pod0 leaf0 rail1")
    assert fabric.tier(nodes[0], 0, nodes[2], 0) == "core"


@needs_ibsim
def test_a_card_that_is_cabled_to_another_rail_pays_the_spine() -> None:
    net = three_tiers(pods=1, leaves=1, nodes=3, rails=2)
    net.cut(f"{node_name(0, 0, 2)} mlx5_0", "pod0 leaf0 rail0")
    net.cut(f"{node_name(0, 0, 2)} mlx5_1", "pod0 leaf0 rail1")
    net.join(f"{node_name(0, 0, 2)} mlx5_0", "pod0 leaf0 rail1")
    net.join(f"{node_name(0, 0, 2)} mlx5_1", "pod0 leaf0 rail0")
    fabric = look_at(net)
    assert fabric.nodes[node_name(0, 0, 2)].leaves == ("pod0 leaf0 rail1", "pod0 leaf0 rail0")
    assert fabric.tier(node_name(0, 0, 0), 0, node_name(0, 0, 2), 0) == "spine"
    assert fabric.tier(node_name(0, 0, 0), 0, node_name(0, 0, 2), 1) == "leaf"


@needs_ibsim
def test_a_card_below_two_leaves_is_refused() -> None:
    net = three_tiers(pods=1, leaves=1, nodes=1, rails=2)
    net.add("Hca", "twin mlx5_0", 2)
    net.join("twin mlx5_0", "pod0 leaf0 rail0")
    net.join("twin mlx5_0", "pod0 leaf0 rail1")
    with pytest.raises(ConfigError, match=r"line \d+: mlx5_0 of twin hangs on .* which of the two leaves"):
        look_at(net)


@needs_ibsim
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda text: text[: text.index("vendid", text.index("Ca\t"))],
            "linked here but not described: the file is cut off",
        ),
        (lambda text: text.replace("[1]\t", "[one]\t", 1), "line 11: this is not a port of a switch"),
        (lambda text: text.replace("Switch\t", "Switch ?", 1), "line 10: this is not a switch"),
        (lambda text: text.replace("Ca\t", "Ca ?", 1), "this is not an adapter"),
        (lambda text: text + "Segmentation fault\n", "does not print such a line: 'Segmentation fault'"),
        (lambda text: "\n".join(line for line in text.splitlines() if line.startswith("#")), "describes no switch"),
        (lambda text: text.replace("mlx5_", "ConnectX HCA mlx5_"), "no adapter is named after a node and its card"),
    ],
    ids=["cut off", "port", "switch", "adapter", "foreign line", "empty", "unnamed"],
)
def test_damaged_outputs_are_refused(three_tier_text: str, change: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_ibnetdiscover(change(three_tier_text), "ib.txt")  # type: ignore[operator]
    assert words in str(caught.value)


PRINTOUT = """\
Switch\t64 "S-01"\t\t# "MF0;sw:MQM9700/U1" enhanced port 0 lid 1 lmc 0
[1]\t"H-11"[1](11) \t\t# "a mlx5_0" lid 5 4xNDR
[2]\t"H-12"[1](12) \t\t# "b.site mlx5_0" lid 6 4xNDR
[33]\t"S-03"[1]\t\t# "Quantum" lid 3 4xNDR
[34]\t"S-03"[2]\t\t# "Quantum" lid 3 2xNDR

Switch\t64 "S-02"\t\t# "Quantum" enhanced port 0 lid 2 lmc 0
[1]\t"H-13"[1](13) \t\t# "c mlx5_0" lid 7 4xNDR
[33]\t"S-03"[3]\t\t# "Quantum" lid 3 4xNDR

Switch\t64 "S-03"\t\t# "Quantum" enhanced port 0 lid 3 lmc 0
[1]\t"S-01"[33]\t\t# "MF0;sw:MQM9700/U1" lid 1 4xNDR
[2]\t"S-01"[34]\t\t# "MF0;sw:MQM9700/U1" lid 1 2xNDR
[3]\t"S-02"[33]\t\t# "Quantum" lid 2 4xNDR

caguid=0x11
Ca\t1 "H-11"\t\t# "a mlx5_0"
[1](11) \t"S-01"[1]\t\t# lid 5 lmc 0 "MF0;sw:MQM9700/U1" lid 1 4xNDR
Ca\t1 "H-12"\t\t# "b.site mlx5_0"
Ca\t1 "H-13"\t\t# "c mlx5_0"
"""


def test_speeds_and_trunks_of_a_real_printout_count() -> None:
    """As newer switches print it: equal descriptions, several links between two switches, a link that is slower."""
    fabric = read_ibnetdiscover(PRINTOUT, "ib", nodes=["a", "b", "c", "d"])
    assert fabric.pod_of_leaf == {"MF0;sw:MQM9700/U1": "Quantum S-03", "Quantum S-02": "Quantum S-03"}
    assert fabric.leaf_uplinks == {"MF0;sw:MQM9700/U1": 2, "Quantum S-02": 1}
    assert fabric.nodes["b"].leaves == ("MF0;sw:MQM9700/U1",)
    assert fabric.link_bytes_per_s == {"leaf": 50 * 10**9, "spine": 50 * 10**9}
    # Three cards of 400 Gb/s over links of 400, 200 and 400.
    assert fabric.spine_oversubscription == 1.2
    assert "1 nodes, such as d, have no card in the fabric" in fabric.notes


@pytest.mark.parametrize("speed", ["0xNDR", "9" * 5000 + "xNDR", "13xNDR"])
def test_a_link_of_no_width_is_refused(speed: str) -> None:
    with pytest.raises(ConfigError, match=r"ib, line 2: a link of the width [0-9]+ is none"):
        read_ibnetdiscover(PRINTOUT.replace("4xNDR", speed, 1), "ib")


def test_switches_one_above_the_other_have_an_end() -> None:
    lines = ['Switch 2 "S-00" # "s0"', '[1] "H-11"[1](11) # "a mlx5_0" lid 5 4xNDR', 'Ca 1 "H-11" # "a mlx5_0"']
    for index in range(1, 100):
        ends = [(1, f"S-{index - 1:02}")] + ([(2, f"S-{index + 1:02}")] if index < 99 else [])
        lines.append(f'Switch 2 "S-{index:02}" # "s{index}"')
        lines += [f'[{port}] "{other}"[1] # "x" lid 3 4xNDR' for port, other in ends]
    lines.insert(2, '[2] "S-01"[1] # "x" lid 3 4xNDR')
    with pytest.raises(ConfigError, match=r"line \d+: s64 is more than 63 links away from the nodes"):
        read_ibnetdiscover("\n".join(lines), "ib")

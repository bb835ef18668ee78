"""FC-44: the matrix of `nvidia-smi topo -m` is read by the names of its columns."""

from __future__ import annotations

import pytest

from hpc_train.cluster.gpu_topology import nics_of_gpus, parse_nvlink_domain, parse_topo_matrix
from hpc_train.errors import ConfigError


def matrix(ways: list[list[str]], links: str = "NV18", *, legend: bool = True, numa: str = "N/A") -> str:
    """As the command prints it: ways[gpu][nic], the same link between all GPUs."""
    gpus, nics = len(ways), len(ways[0])
    head = [f"GPU{i}" for i in range(gpus)] + [f"NIC{i}" for i in range(nics)]
    lines = ["\t".join(["", *head, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for gpu in range(gpus):
        cells = [" X " if other == gpu else links for other in range(gpus)] + [f" {way} " for way in ways[gpu]]
        lines.append("\t".join([f"GPU{gpu}", *cells, "0-47,96-143", numa, "", "N/A"]))
    for nic in range(nics):
        cells = [ways[gpu][nic] for gpu in range(gpus)] + [" X " if nic == other else "SYS" for other in range(nics)]
        lines.append("\t".join([f"NIC{nic}", *cells, "", "", ""]))
    text = "\n".join(lines) + "\n\nLegend:\n\n  X    = Self\n  PIX  = Connection traversing at most one bridge\n\n"
    return text + ("NIC Legend:\n\n" + "".join(f"  NIC{i}: mlx5_{i}\n" for i in range(nics)) if legend else "")


def test_one_gpu_whose_numa_column_holds_no_number() -> None:
    topology = parse_topo_matrix(matrix([["SYS"]]))
    assert (topology.num_gpus, topology.nics, topology.ways) == (1, ("mlx5_0",), (("SYS",),))
    assert nics_of_gpus(topology) == (None,)


def test_eight_gpus_take_their_own_card_of_ten_and_never_those_for_storage() -> None:
    ways = [["NODE" if gpu // 4 == nic // 5 else "SYS" for nic in range(10)] for gpu in range(8)]
    own = [0, 1, 3, 4, 5, 6, 8, 9]  # cards 2 and 7 are for storage
    for gpu, nic in enumerate(own):
        ways[gpu][nic] = "PIX"
    topology = parse_topo_matrix(matrix(ways))
    assert nics_of_gpus(topology) == tuple(f"mlx5_{nic}" for nic in own)
    assert topology.islands == (0,) * 8


def test_pairs_of_gpus_below_one_bridge_take_its_cards_in_turn_or_share_one() -> None:
    two = [["PXB" if gpu // 2 == nic // 2 else "SYS" for nic in range(4)] for gpu in range(4)]
    assert nics_of_gpus(parse_topo_matrix(matrix(two))) == ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    one = [["PIX" if gpu // 2 == nic else "SYS" for nic in range(2)] for gpu in range(4)]
    assert nics_of_gpus(parse_topo_matrix(matrix(one))) == ("mlx5_0", "mlx5_0", "mlx5_1", "mlx5_1")


def test_more_cards_than_gpus_at_one_distance_decide_nothing() -> None:
    assert nics_of_gpus(parse_topo_matrix(matrix([["NODE"] * 3, ["NODE"] * 3]))) == (None, None)


def test_the_header_may_be_coloured_and_older_drivers_name_devices_in_it() -> None:
    text = matrix([["PIX"]]).replace("\tGPU0", "\t\x1b[4mGPU0", 1).replace("GPU NUMA ID", "GPU NUMA ID\x1b[0m", 1)
    assert nics_of_gpus(parse_topo_matrix(text)) == ("mlx5_0",)
    old = "\tGPU0\tmlx5_1\tCPU Affinity\nGPU0\t X \tPHB\t0-7\nmlx5_1\tPHB\t X \t\n"
    assert nics_of_gpus(parse_topo_matrix(old)) == ("mlx5_1",)


def test_no_cards_is_an_answer_and_no_matrix_is_none() -> None:
    empty = parse_topo_matrix("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0-7\nGPU1\tSYS\t X \t0-7\n")
    assert (empty.nics, nics_of_gpus(empty), empty.islands) == ((), (None, None), (0, 1))
    failed = "Unable to determine the topology: Function Not Found\n"
    with pytest.raises(ConfigError, match="no matrix of GPUs; it says: Unable to determine"):
        parse_topo_matrix(failed)
    with pytest.raises(ConfigError, match="it says: nothing"):
        parse_topo_matrix("")
    text = matrix([["PIX"]])
    with pytest.raises(ConfigError, match=r"it says: GPU0 NIC0.*have to be separated by tabs"):
        parse_topo_matrix(text.replace("\t", " "))
    with pytest.raises(ConfigError, match="line 14: GPU0 has a row already"):
        parse_topo_matrix(text + text)
    assert parse_topo_matrix(text.replace("\n", "\r\n")) == parse_topo_matrix(text)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (" PIX ", " NEAR ", "line 2: 'NEAR' below NIC0"),
        ("GPU1\tNV18", "GPU7\tNV18", "the columns are GPU0, GPU1, the rows GPU0, GPU7"),
        (" PIX ", " X ", "line 2: 'X' below NIC0 is no kind of connection there"),
        (" PIX ", " NV4 ", "line 2: 'NV4' below NIC0 is no kind of connection there"),
        ("NIC0: mlx5_0", "", "does not say which device NIC0 is"),
        ("GPU1\tNV18\t X \t PIX ", "GPU1\tNV18", "line 3: 'SYS' below GPU1"),
        ("GPU0\t X \t", "GPU0\tNV18\t", "line 2: 'NV18' below GPU0"),
        ("GPU0\t X \tNV18", "GPU0\t X \t X ", "line 2: 'X' below GPU1"),
        ("GPU1\tNV18", "GPU1\tSYS", "GPU0 reaches GPU1 over NV18, and this one that over SYS"),
        ("GPU1\tNV18", "GPU0\tX", "line 3: GPU0 has a row already"),
        ("\tGPU0\tGPU1", "\tGPU0\tGPU0", "line 1: GPU0 is there more than once"),
        ("NIC1: mlx5_1", "NIC1: mlx5_0", "line 1: mlx5_0 is there more than once"),
    ],
)
def test_malformed_matrices_are_refused(old: str, new: str, words: str) -> None:
    text = matrix([["PIX", "SYS"], ["PIX", "SYS"]])
    assert old in text
    with pytest.raises(ConfigError, match=words):
        parse_topo_matrix(text.replace(old, new, 1))


def test_islands_of_nvlink() -> None:
    rows = ["\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity"]
    for gpu in range(4):
        words = ["X" if gpu == other else "NV12" if gpu % 2 == other % 2 else "SYS" for other in range(4)]
        rows.append("\t".join([f"GPU{gpu}", *words, "0-7"]))
    assert parse_topo_matrix("\n".join(rows)).islands == (0, 1, 0, 1)


def test_the_domain_of_nvlink_over_nodes() -> None:
    def gpu(cluster: str, clique: str) -> str:
        return (
            f"    Fabric\n        State    : Completed\n        CliqueId : {clique}\n        ClusterUUID : {cluster}\n"
        )

    rack = "50000000-0000-0000-0000-000000000004"
    assert parse_nvlink_domain(gpu(rack, "7") * 4) == f"{rack}.7"
    assert parse_nvlink_domain(gpu("N/A", "N/A") * 8) is None
    assert parse_nvlink_domain(gpu("00000000-0000-0000-0000-000000000000", "0")) is None
    assert parse_nvlink_domain("no such section") is None
    with pytest.raises(ConfigError, match="different NVLink domains"):
        parse_nvlink_domain(gpu(rack, "7") + gpu(rack, "8"))
    assert parse_nvlink_domain("    Fabric\n        State    : N/A\n        Status   : N/A\n") is None
    with pytest.raises(ConfigError, match="one of ClusterUUID and CliqueId and not the other"):
        parse_nvlink_domain((gpu(rack, "7") * 2).rpartition("        ClusterUUID")[0])

"""What a node tells of itself: from nvidia-smi, and from sysfs where that does not answer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from hpc_train.cluster.fabric_node import MARK, NodeReport, parse_reports, report_node
from hpc_train.cluster.long_lines import in_pieces
from tests.cluster.test_binding import fake_sys
from tests.cluster.test_gpu_topology import matrix

ENV = {"SLURMD_NODENAME": "n7", "SLURM_TOPOLOGY_ADDR": "l1.n7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
GPUS = [("pci0000:10/0000:10:01.0/0000:11:00.0", 0), ("pci0000:80/0000:80:01.0/0000:81:00.0", 1)]
NICS = {
    "mlx5_0": ("pci0000:10/0000:10:01.0/0000:12:00.0", 0, "4: ACTIVE"),
    "mlx5_1": ("pci0000:80/0000:80:01.0/0000:82:00.0", 1, "4: ACTIVE"),
}


def smi(folder: Path, topo: str, query: str = "") -> dict[str, str]:
    """The environment with an nvidia-smi that prints these; a script after `!` is run instead."""
    (folder / "topo.txt").write_text(topo)
    (folder / "query.txt").write_text(query)
    action = (
        topo[1:]
        if topo.startswith("!")
        else f'if [ "$1" = topo ]; then cat {folder}/topo.txt; else cat {folder}/query.txt; fi'
    )
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{action}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return {**ENV, "PATH": f"{folder}:/usr/bin:/bin"}


@pytest.fixture
def sys_root(tmp_path: Path) -> str:
    return str(fake_sys(tmp_path / "sys", GPUS, NICS))


def test_nvidia_smi_is_asked_first(tmp_path: Path, sys_root: str) -> None:
    crossed = matrix([["SYS", "PIX"], ["PIX", "SYS"]])
    query = "  Fabric\n  CliqueId : 3\n  ClusterUUID : 5000-1\n" * 2
    report = report_node(smi(tmp_path, crossed, query), sys_root)
    assert report == NodeReport("n7", "l1.n7", "switch.node", 2, ("mlx5_1", "mlx5_0"), "5000-1.3")


def test_sysfs_tells_where_nvidia_smi_fails_and_the_failure_is_told(tmp_path: Path, sys_root: str) -> None:
    """FC-44: with a software RDMA device the command fails altogether, which is not "no cards"."""
    report = report_node(smi(tmp_path, "!echo Function Not Found >&2; exit 2"), sys_root)
    assert report.nics == ("mlx5_0", "mlx5_1")
    assert report.notes == ("nvidia-smi topo -m: exit code 2: Function Not Found",)
    assert report_node({**ENV, "PATH": str(tmp_path / "none")}, sys_root).nics == ("mlx5_0", "mlx5_1")


@pytest.mark.parametrize("word", ["X", "NV4"])
def test_a_strange_word_between_a_gpu_and_a_card_is_told_and_sysfs_asked(
    word: str, tmp_path: Path, sys_root: str
) -> None:
    report = report_node(smi(tmp_path, matrix([["SYS", word], ["PIX", "SYS"]])), sys_root)
    assert report.nics == ("mlx5_0", "mlx5_1")
    assert f"line 2: '{word}' below NIC1" in report.notes[0]


def test_a_matrix_of_fewer_gpus_than_the_node_has_is_not_taken_for_the_node_s(tmp_path: Path, sys_root: str) -> None:
    report = report_node(smi(tmp_path, matrix([["SYS", "PIX"]])), sys_root)
    assert (report.num_gpus, report.nics) == (2, ("mlx5_0", "mlx5_1"))


def test_gpus_in_separate_groups_of_nvlink_are_told(tmp_path: Path) -> None:
    gpus = [(f"pci0000:{n}0/0000:{n}0:01.0/0000:{n}1:00.0", 0) for n in range(1, 5)]
    root = str(fake_sys(tmp_path / "sys4", gpus, NICS))
    text = matrix([["PIX", "SYS"], ["PIX", "SYS"], ["SYS", "PIX"], ["SYS", "PIX"]], links="SYS")
    text = text.replace("GPU0\t X \tSYS", "GPU0\t X \tNV12").replace("GPU1\tSYS", "GPU1\tNV12")
    text = text.replace("GPU2\tSYS\tSYS\t X \tSYS", "GPU2\tSYS\tSYS\t X \tNV12")
    text = text.replace("GPU3\tSYS\tSYS\tSYS", "GPU3\tSYS\tSYS\tNV12")
    report = report_node(smi(tmp_path, text), root)
    assert report.notes == ("its 4 GPUs are joined by NVLink in 2 separate groups",)


def test_a_card_on_another_numa_node_is_not_near(tmp_path: Path) -> None:
    root = str(fake_sys(tmp_path / "far", GPUS, {"mlx5_0": NICS["mlx5_0"]}))
    assert report_node({**ENV, "PATH": ""}, root).nics == ("mlx5_0", None)


def test_a_node_without_gpus_has_collected_nothing(tmp_path: Path) -> None:
    root = str(fake_sys(tmp_path / "plain", [], NICS))
    assert report_node({**ENV, "PATH": ""}, root) == NodeReport("n7", "l1.n7", "switch.node")
    assert report_node({"PATH": "", "SLURMD_NODENAME": "x"}, root) == NodeReport("x")


def test_reports_come_back_from_the_output_of_srun() -> None:
    reports = (NodeReport("n1", "a.n1", "switch.node", 2, ("m0", None), "d", ("x",)), NodeReport("n2"))
    lines = "".join(in_pieces(MARK, report.node, json.dumps(asdict(report))) for report in reports)
    assert parse_reports("a word of the site\n" + lines) == reports

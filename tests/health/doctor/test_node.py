"""The look at one node as a whole, on a made-up /sys with GPUs and cards."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from hpc_train.cluster.long_lines import in_pieces
from hpc_train.health.doctor.node import MARK, look_at_node, parse_node_lines
from tests.health.doctor.test_infiniband import make_port

REQUEST = {
    "runs_dir": "",
    "token": None,
    "num_nodes": 1,
    "interface": None,
    "template": None,
    "hdfs": None,
    "verbose": False,
    "watch_s": 0.0,
}


def make_pci(root: Path, address: str, vendor: str, kind: str) -> Path:
    """A device below a bridge of its own, as /sys/devices has it, and its link in bus/pci."""
    folder = root / "devices" / f"pci{address[:7]}" / address
    folder.mkdir(parents=True)
    for name, text in (("vendor", vendor), ("class", kind), ("numa_node", "0"), ("local_cpulist", "0-1")):
        (folder / name).write_text(text + "\n")
    (root / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (root / "bus/pci/devices" / address).symlink_to(folder)
    return folder


def look(root: Path, env: dict[str, str] | None = None, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    answer = look_at_node({**REQUEST, "runs_dir": str(root), **changes}, env or {}, str(root / "sys"))
    return answer, {finding["id"]: finding for finding in answer["findings"]}


def test_gpus_cards_and_counters_of_a_node_come_together(tmp_path: Path) -> None:
    root = tmp_path / "sys"
    make_pci(root, "0000:18:00.0", "0x10de", "0x030200")
    nic = make_pci(root, "0000:19:00.0", "0x15b3", "0x020700")
    make_port(root, "mlx5_0", symbol_error=77)
    (root / "class/infiniband/mlx5_0/device").symlink_to(nic)
    answer, found = look(tmp_path, {"SLURMD_NODENAME": "n7", "NCCL_IB_HCA": "mlx5_9", "CUDA_VISIBLE_DEVICES": "0"})
    assert (answer["host"], answer["gpus"], answer["active_ports"]) == ("n7", 1, 1)
    assert "0000:18:00.0" in found["devices.map"]["details"][1] and "mlx5_0" in found["devices.map"]["details"][1]
    assert "symbol_error=77" in found["infiniband.counters"]["found"]
    assert found["network.hca"]["level"] == "error"
    assert found["python.torch"]["level"] == "error" or "CUDA" in found["python.versions"]["found"]
    assert all(finding["hosts"] == ["n7"] for finding in answer["findings"])
    assert parse_node_lines("Loading module x\n" + in_pieces(MARK, "n7", json.dumps(answer))) == [answer]


def test_counters_are_read_twice_when_asked_and_old_errors_are_then_not_told(tmp_path: Path) -> None:
    make_port(tmp_path / "sys", "mlx5_0", symbol_error=77)
    _, found = look(tmp_path, watch_s=0.01)
    assert found["infiniband.counters"]["found"] == "no error counter grew in 0.01 s"


def test_ethtool_is_asked_for_the_interfaces_of_the_cards(tmp_path: Path) -> None:
    make_port(tmp_path / "sys", "mlx5_0")
    (tmp_path / "sys/class/infiniband/mlx5_0/device/net/ib0").mkdir(parents=True)
    program = tmp_path / "ethtool"
    program.write_text("#!/bin/sh\n[ \"$*\" = '-S ib0' ] && echo '     fec_uncorrectable_blocks_total: 123'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    _, found = look(tmp_path, {"PATH": str(tmp_path)})
    assert "fec_uncorrectable_blocks_total=123" in found["infiniband.fec"]["found"]


def test_amd_accelerators_alone_are_an_error(tmp_path: Path) -> None:
    make_pci(tmp_path / "sys", "0000:18:00.0", "0x1002", "0x120000")
    assert look(tmp_path)[1]["devices.amd"]["level"] == "error"


def test_the_file_of_the_launching_host_is_looked_for(tmp_path: Path) -> None:
    """FC-67"""
    token = tmp_path / "token"
    assert not look(tmp_path, token=str(token))[0]["sees_token"]
    token.touch()
    assert look(tmp_path, token=str(token))[0]["sees_token"]
    assert sorted(os.listdir(tmp_path)) == ["token"]

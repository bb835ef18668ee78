"""Trees of files laid out as /sys/class/infiniband has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.health.doctor.infiniband import (
    THRESHOLDS,
    counter_findings,
    differing_ports,
    ethtool_counters,
    port_findings,
    read_ports,
)


def make_port(root: Path, device: str, *, number: int = 1, layer: str = "InfiniBand", state: str = "4: ACTIVE",
              physical: str = "5: LinkUp", rate: str = "400 Gb/sec (4X NDR)", **counters: int) -> None:  # fmt: skip
    folder = root / "class/infiniband" / device / "ports" / str(number)
    (folder / "counters").mkdir(parents=True)
    (folder / "hw_counters").mkdir()
    for name, text in (("link_layer", layer), ("state", state), ("phys_state", physical), ("rate", rate)):
        (folder / name).write_text(text + "\n")
    for name in THRESHOLDS:
        (folder / "counters" / name).write_text("0\n")
    for name, value in counters.items():
        place = "counters" if name in THRESHOLDS else "hw_counters"
        (folder / place / name).write_text(f"{value}\n")


def all_findings(root: Path) -> list:
    ports = read_ports(root)
    return [*port_findings(ports, "n1"), *counter_findings(ports, "n1")]


def test_healthy_ports_are_told_in_one_line_each(tmp_path: Path) -> None:
    for index in range(8):
        make_port(tmp_path, f"mlx5_{index}", symbol_error=3, link_downed=1)
    findings = all_findings(tmp_path)
    assert [(finding.id, finding.level) for finding in findings] == [
        ("infiniband.ports", "ok"), ("infiniband.counters", "ok"),
    ]  # fmt: skip
    assert "all 8 ports are active: 8 at 400 Gb/s" in findings[0].found


def test_a_machine_without_cards_is_no_fault(tmp_path: Path) -> None:
    assert [(finding.id, finding.level) for finding in all_findings(tmp_path)] == [("infiniband.none", "note")]


@pytest.mark.parametrize("name", sorted(THRESHOLDS))
def test_each_counter_warns_above_its_threshold_and_not_at_it(tmp_path: Path, name: str) -> None:
    limit = THRESHOLDS[name].limit
    make_port(tmp_path, "mlx5_0", **{name: limit})
    make_port(tmp_path, "mlx5_1", **{name: limit + 1})
    (finding,) = counter_findings(read_ports(tmp_path), "n1")
    assert finding.level == "warning"
    assert f"mlx5_1:1 {name}={limit + 1} (threshold {limit})" in finding.found
    assert "--watch-errors" in finding.cure


@pytest.mark.parametrize(
    ("state", "physical", "layer", "level", "words"),
    [
        ("1: DOWN", "2: Polling", "InfiniBand", "warning", "DOWN, Polling"),
        ("1: DOWN", "3: Disabled", "InfiniBand", "warning", "DOWN, Disabled"),
        ("2: INIT", "5: LinkUp", "InfiniBand", "warning", "subnet manager"),
        ("1: DOWN", "3: Disabled", "Ethernet", "note", "no cable"),
    ],
)
def test_ports_that_are_not_active(
    tmp_path: Path, state: str, physical: str, layer: str, level: str, words: str
) -> None:
    make_port(tmp_path, "mlx5_0")
    make_port(tmp_path, "mlx5_1", layer=layer, state=state, physical=physical)
    (finding,) = port_findings(read_ports(tmp_path), "n1")
    assert finding.level == level
    assert words in finding.found + finding.cure


def test_no_active_port_at_all_means_tcp(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0", state="1: DOWN", physical="2: Polling")
    (finding,) = port_findings(read_ports(tmp_path), "n1")
    assert "goes over TCP" in finding.found


def test_a_port_slower_than_its_neighbours_of_the_same_kind(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0")
    make_port(tmp_path, "mlx5_1", rate="100 Gb/sec (1X NDR)")
    make_port(tmp_path, "mlx5_2", layer="Ethernet", rate="25 Gb/sec (1X EDR)")
    (finding,) = port_findings(read_ports(tmp_path), "n1")
    assert finding.found == "mlx5_1:1 runs at 100 Gb/s, others of this node at 400 Gb/s"


def test_two_readings_tell_growth_from_old_errors(tmp_path: Path) -> None:
    make_port(tmp_path / "a", "mlx5_0", symbol_error=5000, port_rcv_errors=7)
    make_port(tmp_path / "b", "mlx5_0", symbol_error=5000, port_rcv_errors=9)
    before, later = read_ports(tmp_path / "a"), read_ports(tmp_path / "b")
    (finding,) = counter_findings(before, "n1", later, 30.0)
    assert finding.found.startswith("mlx5_0:1 port_rcv_errors grew by 2 in 30 s")
    assert "--exclude=n1" in finding.cure
    (calm,) = counter_findings(later, "n1", later, 30.0)
    assert (calm.level, calm.found) == ("ok", "no error counter grew in 30 s")


def test_error_correction_counts_where_drivers_tell(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0", fec_uncorrectable_blocks=400, rs_corrected_symbols=10**9)
    found = counter_findings(read_ports(tmp_path), "n1")
    assert [(finding.id, finding.level) for finding in found] == [("infiniband.fec", "warning")]
    assert "fec_uncorrectable_blocks=400" in found[0].found


def test_roce_counters_warn_only_when_they_grow(tmp_path: Path) -> None:
    make_port(tmp_path / "a", "mlx5_0", layer="Ethernet", out_of_sequence=900, out_of_buffer=1)
    make_port(tmp_path / "b", "mlx5_0", layer="Ethernet", out_of_sequence=950, out_of_buffer=99)
    before, later = read_ports(tmp_path / "a"), read_ports(tmp_path / "b")
    assert counter_findings(before, "n1")[0].level == "ok"
    (finding,) = counter_findings(before, "n1", later, 5.0)
    assert "out_of_sequence grew by 50" in finding.found


def test_of_ethtool_only_the_counters_of_the_link_are_kept() -> None:
    text = """NIC statistics:
     rx_packets: 123456
     rx_corrected_bits_phy: 88
     rx_symbol_err_phy: 4
     fec_uncorrectable_blocks_total: 2
     rx_err_lane_0_phy: 5
"""
    assert ethtool_counters(text) == {
        "rx_corrected_bits_phy": 88, "rx_symbol_err_phy": 4, "fec_uncorrectable_blocks_total": 2,
    }  # fmt: skip


def test_damaged_trees_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    folder = tmp_path / "class/infiniband/mlx5_0/ports/1"
    (folder / "counters").mkdir(parents=True)
    (folder / "counters/symbol_error").write_text("N/A\n")
    (port,) = read_ports(tmp_path)
    assert (port.name, port.state, port.rate_gbps, dict(port.counters)) == ("mlx5_0:1", "", 0.0, {})


def test_a_node_that_lacks_a_rail_is_named() -> None:
    (finding,) = differing_ports({"n1": 8, "n2": 8, "n3": 7})
    assert finding.hosts == ("n3",)
    assert "most nodes of this job have 8" in finding.found
    assert differing_ports({"n1": 8, "n2": 8}) == []
    assert differing_ports({}) == []

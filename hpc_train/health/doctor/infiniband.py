"""RDMA ports as sysfs shows them: link state, rate and error counters, on InfiniBand and on RoCE.

Source of the counters' meaning: Documentation/ABI/stable/sysfs-class-infiniband of the Linux kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.health.doctor.answers import ask, read_text
from hpc_train.health.doctor.findings import Finding


@dataclass(frozen=True)
class Port:
    """One port. state and phys_state are the kernel's words (ACTIVE, LinkUp); rate_gbps is 0 where unknown."""

    device: str
    number: int
    link_layer: str
    state: str
    phys_state: str
    rate_gbps: float
    counters: Mapping[str, int]

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class Threshold:
    """A counter, above which value it is worth a look, and what it means."""

    limit: int
    meaning: str


# cited: the values of infiniband-diags' own file error_thresholds (versions up to 44).
THRESHOLDS = {
    "symbol_error": Threshold(10, "bits arrive damaged: a dirty or loose connector, a bent or bad cable"),
    "link_error_recovery": Threshold(10, "the link retrained itself: a marginal cable or transceiver"),
    "link_downed": Threshold(10, "the link failed and came back: cable, transceiver, or the other end restarts"),
    "port_rcv_errors": Threshold(10, "packets arrived damaged: cable, transceiver or the other end's port"),
    "port_rcv_remote_physical_errors": Threshold(100, "packets were marked bad further away: another link is ill"),
    "port_rcv_switch_relay_errors": Threshold(100, "packets could not be forwarded"),
    "port_xmit_discards": Threshold(100, "packets were thrown away because the port was down or congested"),
    "port_xmit_constraint_errors": Threshold(100, "packets were not allowed to leave: partition keys"),
    "port_rcv_constraint_errors": Threshold(100, "packets were not allowed in: partition keys"),
    "local_link_integrity_errors": Threshold(10, "too many damaged packets in a row: cable or transceiver"),
    "excessive_buffer_overrun_errors": Threshold(10, "flow control failed: firmware, or the other end's port"),
    "VL15_dropped": Threshold(100, "management packets were lost"),
}
# Forward error correction, where a driver counts it: under several names, in sysfs or by ethtool. Corrected
# symbols are daily life on links of 50 Gb/s a lane and more; what could not be corrected is a lost packet.
_FEC_UNCORRECTED = re.compile(r".*(uncorrect|fec_error|rx_symbol_err|pcs_symbol_err).*", re.IGNORECASE)
_FEC_CORRECTED = re.compile(
    r".*(rs_corrected|fec.*corr|corrected_(bits|blocks|symbol)|corrected_bits_phy).*", re.IGNORECASE
)
# assumed: one uncorrectable block may be from bringing the link up.
_MOST_UNCORRECTED = 10
# RoCE: names of mlx5, irdma and bnxt_re. assumed: some at start-up are normal, so only watched growth warns.
_ROCE_GROWTH = (
    "local_ack_timeout_err",
    "packet_seq_err",
    "out_of_sequence",
    "rnr_nak_retry_err",
    "implied_nak_seq_err",
)


def read_ports(sys_root: str | Path = "/sys", *, ethtool: str | None = None) -> tuple[Port, ...]:
    """Read all ports of all RDMA devices. What cannot be read is left out.

    ethtool: the program to ask for the FEC counters of the network interfaces of these devices.
    """
    ports = []
    for device in _listed(Path(sys_root) / "class/infiniband"):
        for folder in _listed(device / "ports"):
            counters = {**_counters(folder / "counters"), **_counters(folder / "hw_counters")}
            if ethtool is not None:
                for interface in _listed(device / "device/net"):
                    counters |= ethtool_counters(ask([ethtool, "-S", interface.name], timeout_s=5).out)
            ports.append(
                Port(
                    device.name,
                    int(folder.name) if folder.name.isdecimal() else 0,
                    read_text(folder / "link_layer") or "InfiniBand",
                    _word(read_text(folder / "state")),
                    _word(read_text(folder / "phys_state")),
                    _rate(read_text(folder / "rate")),
                    counters,
                )
            )
    return tuple(ports)


def ethtool_counters(text: str) -> dict[str, int]:
    """The FEC and symbol counters in the output of `ethtool -S`."""
    found = {}
    for line in text.splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if value.isdecimal() and (_FEC_UNCORRECTED.fullmatch(name) or _FEC_CORRECTED.fullmatch(name)):
            found[name] = int(value)
    return found


def port_findings(ports: Sequence[Port], host: str) -> list[Finding]:
    """Link state and rate of a node's ports."""
    if not ports:
        return [Finding("infiniband.none", "note", "no InfiniBand or RoCE device; MPI and NCCL use TCP", hosts=(host,))]
    found = [_state_finding(port, ports, host) for port in ports if not port.is_active]
    active = [port for port in ports if port.is_active]
    for layer in sorted({port.link_layer for port in active}):
        same = [port for port in active if port.link_layer == layer]
        best = max(port.rate_gbps for port in same)
        # On one node the cards of the compute fabric are of one kind; a slower one is the storage's or degraded.
        found += [
            Finding(
                "infiniband.rate",
                "warning",
                f"{port.name} runs at {port.rate_gbps:g} Gb/s, others of this node at {best:g} Gb/s",
                "if it belongs to the compute fabric the link came up with fewer lanes or at a lower speed: have its "
                "cable reseated; if not, keep NCCL off it, NCCL_IB_HCA=^=" + port.name,
                (host,),
            )
            for port in same
            if 0 < port.rate_gbps < best
        ]
    if active and not found:
        rates = ", ".join(
            f"{sum(port.rate_gbps == rate for port in active)} at {rate:g} Gb/s"
            for rate in sorted({port.rate_gbps for port in active}, reverse=True)
        )
        found.append(Finding("infiniband.ports", "ok", f"all {len(ports)} ports are active: {rates}", hosts=(host,)))
    return found


def counter_findings(
    ports: Sequence[Port], host: str, later: Sequence[Port] | None = None, seconds: float = 0.0
) -> list[Finding]:
    """Error counters above their thresholds; with a later reading, those that grow.

    A single reading cannot tell an error of today from one of last year, so it only ever warns.
    """
    found = []
    for position, port in enumerate(ports):
        if later is None:
            found += _standing(port, host)
        else:
            found += _growing(port, later[position], host, seconds)
    if ports and not found:
        told = "no error counter is above its threshold" if later is None else f"no error counter grew in {seconds:g} s"
        found.append(Finding("infiniband.counters", "ok", told, hosts=(host,)))
    return found


def differing_ports(active: Mapping[str, int]) -> list[Finding]:
    """Hosts with fewer active ports than most: a rail is missing there."""
    counts = list(active.values())
    usual = max(set(counts), key=lambda count: (counts.count(count), count)) if counts else 0
    return [
        Finding(
            "infiniband.rails",
            "warning",
            f"{count} active RDMA ports, but most nodes of this job have {usual}: traffic of the missing rails crosses "
            "switches",
            f"leave the node out, `--exclude={host}`, and tell the site",
            (host,),
        )
        for host, count in active.items()
        if count < usual
    ]


def _state_finding(port: Port, ports: Sequence[Port], host: str) -> Finding:
    told = f"{port.name} ({port.link_layer}) is {port.state or 'in an unknown state'}, {port.phys_state or '?'}"
    is_up = port.phys_state == "LinkUp"
    if port.link_layer == "Ethernet" and not is_up:
        return Finding("infiniband.unused", "note", f"{told}: no cable, or switched off", hosts=(host,))
    if is_up and port.state == "INIT":
        cure = "no subnet manager has set this port up: tell the site (its subnet manager does not reach the node)"
    else:
        cure = (
            f"leave the node out, `--exclude={host}`, and tell the site; if the port is meant to be unused, ignore it"
        )
    others = "" if any(other.is_active for other in ports) else "; no port of this node is active, so all goes over TCP"
    return Finding("infiniband.port", "warning", told + others, cure, (host,))


def _standing(port: Port, host: str) -> list[Finding]:
    found = []
    for name, threshold in THRESHOLDS.items():
        value = port.counters.get(name, 0)
        if value > threshold.limit:
            found.append(
                Finding(
                    "infiniband.counters",
                    "warning",
                    f"{port.name} {name}={value} (threshold {threshold.limit}): {threshold.meaning}",
                    "see whether it still grows: `hpc-train doctor --watch-errors 30` while a job runs",
                    (host,),
                )
            )
    for name, value in port.counters.items():
        if _FEC_UNCORRECTED.fullmatch(name) and value > _MOST_UNCORRECTED:
            found.append(
                Finding(
                    "infiniband.fec",
                    "warning",
                    f"{port.name} {name}={value}: error correction (FEC) failed on as many blocks",
                    "see whether it still grows: `hpc-train doctor --watch-errors 30` while a job runs",
                    (host,),
                )
            )
    return found


def _growing(port: Port, later: Port, host: str, seconds: float) -> list[Finding]:
    found = []
    for name, value in later.counters.items():
        grown = value - port.counters.get(name, 0)
        is_fec = _FEC_UNCORRECTED.fullmatch(name) is not None
        if grown <= 0 or not (name in THRESHOLDS or is_fec or name in _ROCE_GROWTH):
            continue
        meaning = THRESHOLDS[name].meaning if name in THRESHOLDS else "packets are lost on this link or behind it"
        found.append(
            Finding(
                "infiniband.fec" if is_fec else "infiniband.counters",
                "warning",
                f"{port.name} {name} grew by {grown} in {seconds:g} s: {meaning}",
                f"leave the node out, `--exclude={host}`, and give the site this line",
                (host,),
            )
        )
    return found


def _counters(folder: Path) -> dict[str, int]:
    found = {}
    for path in _listed(folder):
        text = read_text(path)
        if text.isdecimal():
            found[path.name] = int(text)
    return found


def _listed(folder: Path) -> list[Path]:
    """The entries of a folder, mlx5_2 before mlx5_10."""
    try:
        names = list(folder.iterdir())
    except OSError:
        return []
    return sorted(names, key=lambda path: [part.zfill(8) for part in re.split(r"(\d+)", path.name)])


def _word(text: str) -> str:
    """`ACTIVE` of `4: ACTIVE`."""
    return text.partition(":")[2].strip() or text


def _rate(text: str) -> float:
    """200.0 of `200 Gb/sec (4X HDR)`."""
    match = re.match(r"([0-9.]+)\s*Gb", text)
    return float(match[1]) if match else 0.0

"""Which cores and which network card belong to a GPU, read from sysfs, within the cores that were granted.

The plan is a table to print, and cpu sets to apply; a core outside the granted ones is never in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

_NVIDIA_VENDOR = "0x10de"
# cited: PCI code and ID assignment specification, class 03: VGA controller 00, 3D controller 02.
_DISPLAY_CLASSES = ("0x0300", "0x0302")


@dataclass(frozen=True)
class Gpu:
    """A GPU at its PCI address; path is its place in the PCI tree, numa None where sysfs gives -1."""

    pci: str
    numa: int | None
    cpus: frozenset[int]
    path: str


@dataclass(frozen=True)
class Nic:
    """An RDMA card. active: some port is in state ACTIVE."""

    name: str
    pci: str
    numa: int | None
    path: str
    link_layer: str
    active: bool


@dataclass(frozen=True)
class Machine:
    """GPUs in PCI order, RDMA cards by name, and the cores of each NUMA node."""

    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    numa_cpus: dict[int, frozenset[int]]


@dataclass(frozen=True)
class Binding:
    """What one local rank gets. note says why, where it is not the cores and the card nearest to its GPU."""

    local_rank: int
    gpu: int | None
    gpu_pci: str | None
    numa: int | None
    cpus: frozenset[int]
    nic: str | None
    note: str = ""


def granted_cpus() -> frozenset[int]:
    """The cores on which this process may run."""
    return frozenset(os.sched_getaffinity(0))


def read_machine(sys_root: str | Path = "/sys") -> Machine:
    """Read GPUs, RDMA cards and NUMA nodes. What sysfs does not show is left out; nothing is raised."""
    root = Path(sys_root)
    numa_cpus = {
        int(folder.name.removeprefix("node")): parse_cpu_list(_read(folder / "cpulist"))
        for folder in _listed(root / "devices/system/node", r"node[0-9]+")
    }
    gpus = []
    for device in _listed(root / "bus/pci/devices", r".*"):
        is_display = _read(device / "class").startswith(_DISPLAY_CLASSES)
        if is_display and _read(device / "vendor") == _NVIDIA_VENDOR:
            numa = _numa(device)
            cpus = numa_cpus.get(numa) if numa is not None else None
            near = cpus if cpus is not None else parse_cpu_list(_read(device / "local_cpulist"))
            gpus.append(Gpu(device.name, numa, near, os.path.realpath(device)))
    return Machine(tuple(gpus), _read_nics(root), numa_cpus)


def plan_bindings(
    machine: Machine, granted: Sequence[Collection[int]], gpus: Sequence[int | None]
) -> tuple[Binding, ...]:
    """Plan cores and network card of each local rank of a node.

    A rank with a GPU gets the granted cores of that GPU's NUMA node; one without gets an even share of its
    granted cores among the ranks that were granted the same ones (where Slurm gave each its own, all of
    them). Where that leaves nothing, the rank keeps what it was granted, and the note says so.

    Args:
        granted: For each local rank, the cores on which it may run.
        gpus: For each local rank, the index of its GPU in machine.gpus, or None.
    """
    plans = []
    for local_rank, (own, gpu_index) in enumerate(zip(granted, gpus, strict=True)):
        allowed = frozenset(own)
        gpu = machine.gpus[gpu_index] if gpu_index is not None and gpu_index < len(machine.gpus) else None
        if gpu is None:
            sharers = [rank for rank, other in enumerate(granted) if frozenset(other) == allowed]
            enough = len(allowed) >= len(sharers)
            cpus = _share(sorted(allowed), sharers.index(local_rank), len(sharers)) if enough else frozenset()
            note = "" if gpu_index is None else "the GPU is not in sysfs"
        else:
            cpus, note = gpu.cpus & allowed, ""
        if not cpus:
            note = "no granted core is near the GPU" if gpu is not None else "more ranks than granted cores"
            cpus = allowed
        nic = None if gpu is None else nearest_nic(machine, machine.gpus.index(gpu))
        numa = gpu.numa if gpu is not None else _numa_of(machine, cpus)
        name, address = (None if nic is None else nic.name), (None if gpu is None else gpu.pci)
        plans.append(Binding(local_rank, gpu_index, address, numa, cpus, name, note))
    return tuple(plans)


def nearest_nic(machine: Machine, gpu_index: int) -> Nic | None:
    """Return the active card with the longest common PCI path, then on the same NUMA node.

    GPUs that are equally near to several cards take them in turn, so that each rail is used.
    """
    gpu = machine.gpus[gpu_index]
    active = [nic for nic in machine.nics if nic.active]
    if not active:
        return None
    best = max(_nearness(gpu, nic) for nic in active)
    nearest = [nic for nic in active if _nearness(gpu, nic) == best]
    rivals = [
        index
        for index, other in enumerate(machine.gpus)
        if [nic for nic in active if _nearness(other, nic) == max(_nearness(other, card) for card in active)] == nearest
    ]
    return nearest[rivals.index(gpu_index) % len(nearest)]


def affinity_warning(granted: Collection[int], cpus_per_task: int | None, num_workers: int) -> str | None:
    """Warn where a rank may run on fewer cores than Slurm promised a task or its loader needs.

    Since Slurm 22.05 srun does not take --cpus-per-task from the batch script, and gives one core a task.
    """
    num_cores, needed = len(granted), num_workers + 1
    promised = f"SLURM_CPUS_PER_TASK={cpus_per_task}" if cpus_per_task else "SLURM_CPUS_PER_TASK is not set"
    if cpus_per_task is not None and num_cores < cpus_per_task:
        problem = f"{promised}, with {num_workers} loader workers"
    elif num_workers and num_cores < needed:
        problem = f"{num_workers} loader workers and the rank itself want {needed}; {promised}"
    else:
        return None
    return (
        f"this rank may run on {num_cores} cores only, but {problem}. Repeat --cpus-per-task on the srun line "
        "(since Slurm 22.05 it is not inherited from sbatch), or lower the number of workers."
    )


def format_table(bindings: Sequence[Binding], host: str, ranks: Sequence[int] | None = None) -> str:
    """Lay bindings out as a table, a line a rank. ranks: global ranks, where they are not the local ones."""
    header = ("rank", "host", "local", "gpu", "pci", "numa", "cores", "nic", "note")
    rows = [
        (
            str(binding.local_rank if ranks is None else ranks[index]),
            host,
            str(binding.local_rank),
            _text(binding.gpu),
            _text(binding.gpu_pci),
            _text(binding.numa),
            format_cpu_list(binding.cpus),
            _text(binding.nic),
            binding.note,
        )
        for index, binding in enumerate(bindings)
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def parse_cpu_list(text: str) -> frozenset[int]:
    """Read the kernel's list of cores, `0-3,8`; empty for an empty text."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        cpus.update(range(int(low), int(high or low) + 1))
    return frozenset(cpus)


def format_cpu_list(cpus: Collection[int]) -> str:
    """Write cores as the kernel does, `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _read_nics(root: Path) -> tuple[Nic, ...]:
    nics = []
    for folder in _listed(root / "class/infiniband", r".*"):
        path = os.path.realpath(folder / "device")
        ports = _listed(folder / "ports", r"[0-9]+")
        active = any("ACTIVE" in _read(port / "state") for port in ports)
        layers = [_read(port / "link_layer") for port in ports]
        nics.append(
            Nic(
                name=folder.name,
                pci=Path(path).name,
                numa=_numa(folder / "device"),
                path=path,
                link_layer=layers[0] if layers else "",
                active=active,
            )
        )
    return tuple(nics)


def _listed(folder: Path, pattern: str) -> list[Path]:
    """Return the entries whose names match, mlx5_2 before mlx5_10."""
    try:
        names = [path for path in folder.iterdir() if re.fullmatch(pattern, path.name)]
    except OSError:
        return []
    return sorted(names, key=lambda path: [part.zfill(8) for part in re.split(r"(\d+)", path.name)])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _numa(device: Path) -> int | None:
    text = _read(device / "numa_node")
    return int(text) if text.isdecimal() else None


def _share(cpus: list[int], position: int, num_shares: int) -> frozenset[int]:
    low = position * len(cpus) // num_shares
    return frozenset(cpus[low : (position + 1) * len(cpus) // num_shares])


def _numa_of(machine: Machine, cpus: frozenset[int]) -> int | None:
    homes = [numa for numa, members in machine.numa_cpus.items() if cpus & members]
    return homes[0] if len(homes) == 1 else None


def _nearness(gpu: Gpu, nic: Nic) -> tuple[int, bool]:
    common = os.path.commonpath([gpu.path, nic.path])
    # The shared part counts from the first PCI bridge on: /sys/devices itself says nothing.
    depth = sum(re.fullmatch(r"pci.*|.*:.*\..", part) is not None for part in common.split("/"))
    return depth, gpu.numa is not None and gpu.numa == nic.numa


def _text(value: object) -> str:
    return "-" if value is None else str(value)

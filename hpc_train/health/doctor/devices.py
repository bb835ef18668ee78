"""GPUs, network cards and NUMA nodes of one host, and what the scheduler lets a job see of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hpc_train.cluster.binding import Machine, format_cpu_list, nearest_nic
from hpc_train.cluster.devices import AMD_REFUSAL, visible_devices
from hpc_train.health.doctor.findings import Finding


def device_findings(
    machine: Machine, env: Mapping[str, str], granted: Collection[int], num_amd_gpus: int, host: str
) -> list[Finding]:
    """A map of the machine, and whether its GPUs can be used.

    num_amd_gpus: AMD accelerators beside what machine has.
    """
    found = []
    hosts = (host,)
    if num_amd_gpus:
        level, more = ("error", "no NVIDIA ones") if not machine.gpus else ("note", f"{len(machine.gpus)} NVIDIA ones")
        told = f"{num_amd_gpus} AMD GPUs and {more}: {AMD_REFUSAL}"
        cure = "choose nodes with NVIDIA GPUs (`-C` or another partition), or nodes without GPUs for a run on the CPU"
        found.append(Finding("devices.amd", level, told, cure, hosts))  # type: ignore[arg-type]
    if not machine.gpus:
        if not num_amd_gpus:
            found.append(
                Finding("devices.gpus", "note", "no NVIDIA GPU: a run here would train on the CPU", hosts=hosts)
            )
    else:
        found += [_visibility(machine, env, host), *_numa_findings(machine, granted, host)]
        rows = map_table(machine)
        found.append(Finding("devices.map", "ok", "GPUs and the network cards nearest to them:", "", hosts, rows))
    return found


def map_table(machine: Machine) -> tuple[str, ...]:
    """A line a GPU: its PCI address, NUMA node, cores and nearest active network card."""
    rows = [("gpu", "pci", "numa", "cores", "nic", "nic's numa")]
    for index, gpu in enumerate(machine.gpus):
        nic = nearest_nic(machine, index)
        numa = "-" if gpu.numa is None else str(gpu.numa)
        near = "-" if nic is None or nic.numa is None else str(nic.numa)
        rows.append((str(index), gpu.pci, numa, format_cpu_list(gpu.cpus) or "-", nic.name if nic else "-", near))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return tuple("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _visibility(machine: Machine, env: Mapping[str, str], host: str) -> Finding:
    total, listed = len(machine.gpus), visible_devices(env)
    in_job = bool(env.get("SLURM_JOB_ID"))
    if listed is None:
        if in_job:
            told = f"{total} GPUs in this node, but CUDA_VISIBLE_DEVICES is not set in this job: it was given none"
            return Finding("devices.visible", "note", told, "ask for them: --gpus-per-node=N", (host,))
        return Finding("devices.visible", "ok", f"{total} GPUs, all visible", hosts=(host,))
    text = env.get("CUDA_VISIBLE_DEVICES", "")
    if not listed:
        told = f"{total} GPUs in this node, but CUDA_VISIBLE_DEVICES={text!r} shows none of them"
        return Finding("devices.visible", "warning", told, "ask for GPUs, or unset the variable outside a job", (host,))
    if len(listed) < total:
        told = f"{len(listed)} of {total} GPUs are visible (CUDA_VISIBLE_DEVICES={text}); the others are not this job's"
        return Finding(
            "devices.visible", "note", told, "for the whole node ask for --gpus-per-node=" + str(total), (host,)
        )
    return Finding("devices.visible", "ok", f"all {total} GPUs are visible", hosts=(host,))


def _numa_findings(machine: Machine, granted: Collection[int], host: str) -> list[Finding]:
    far = [str(index) for index, gpu in enumerate(machine.gpus) if gpu.cpus and not gpu.cpus & frozenset(granted)]
    found = []
    if far:
        told = f"none of the cores granted here ({format_cpu_list(granted)}) is near GPU {', '.join(far)}"
        cure = "ask for more cores (--cpus-per-task), for --exclusive nodes, or for --gpu-bind=none with --gres-flags"
        found.append(Finding("devices.cores", "note", told, cure, (host,)))
    active = [nic for nic in machine.nics if nic.active]
    if active and len(active) < len(machine.gpus):
        told = f"{len(active)} active network cards for {len(machine.gpus)} GPUs: some GPUs share one"
        found.append(Finding("devices.nics", "note", told, hosts=(host,)))
    return found

"""Limits of a process on a node: locked memory, open files, processes, shared memory, core files."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from hpc_train.health.doctor.answers import gib, read_text
from hpc_train.health.doctor.findings import Finding

# assumed: what NCCL and UCX register of buffers for a rank, with room for eight ranks' worth.
_LEAST_LOCKED = 1 << 30
# cited: the kernel's own default, 8 MiB since Linux 5.16 and 64 KiB before: no RDMA queue fits in it.
_HOPELESS_LOCKED = 8 << 20
# assumed: a rank holds a socket to each of some thousand peers, and a loader a file for each dataset.
_LEAST_FILES = 4096
# assumed: eight ranks a node, each with some hundred threads of torch, NCCL, MPI and loaders.
_LEAST_PROCESSES = 4096
# cited: the default of Docker is 64 MiB; eight ranks of NCCL take about 10 MB each and loaders batches beside it.
_LEAST_SHM = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Soft and hard limits, None for unlimited; shm_bytes None where /dev/shm is not there."""

    memlock: tuple[int | None, int | None]
    files: tuple[int | None, int | None]
    processes: tuple[int | None, int | None]
    shm_bytes: int | None
    core_pattern: str
    locks_freely: bool


def read_limits() -> Limits:
    """The limits of this process, which its children inherit."""
    try:
        stats = os.statvfs("/dev/shm")
        shm: int | None = stats.f_bavail * stats.f_frsize
    except OSError:
        shm = None
    return Limits(
        _limit(resource.RLIMIT_MEMLOCK),
        _limit(resource.RLIMIT_NOFILE),
        _limit(resource.RLIMIT_NPROC),
        shm,
        read_text("/proc/sys/kernel/core_pattern"),
        _may_lock_memory(read_text("/proc/self/status")),
    )


def limit_findings(limits: Limits, host: str, *, has_rdma: bool) -> list[Finding]:
    """What is too low. has_rdma: the node has active RDMA ports, which need locked memory."""
    hosts = (host,)
    found = [*_memlock(limits, hosts, has_rdma)]
    soft, hard = limits.files
    if soft is not None and soft < _LEAST_FILES:
        raisable = hard is None or hard > soft
        cure = "`ulimit -n $(ulimit -Hn)` before submitting" if raisable else "ask the site to raise the hard limit"
        told = f"{soft} open files are allowed (ulimit -n); large jobs need {_LEAST_FILES} and more"
        found.append(Finding("limits.files", "warning", told, cure, hosts))
    soft, _ = limits.processes
    if soft is not None and soft < _LEAST_PROCESSES:
        told = f"{soft} processes and threads are allowed (ulimit -u); the ranks of a node need {_LEAST_PROCESSES}"
        cure = "`ulimit -u $(ulimit -Hu)` before submitting, or ask the site"
        found.append(Finding("limits.processes", "warning", told, cure, hosts))
    if limits.shm_bytes is None:
        found.append(Finding("limits.shm", "error", "/dev/shm is not there", "mount it, in a container too", hosts))
    elif limits.shm_bytes < _LEAST_SHM:
        told = f"/dev/shm has {gib(limits.shm_bytes)} free; MPI, NCCL and data loaders want {gib(_LEAST_SHM)}"
        cure = "in a container: --shm-size or a bind of the host's /dev/shm; else remove what dead jobs left in it"
        found.append(Finding("limits.shm", "warning", told, cure, hosts))
    if not found:
        found.append(
            Finding("limits.all", "ok", "locked memory, open files, processes and /dev/shm suffice", hosts=hosts)
        )
    if limits.core_pattern:
        told = f"core files go to {limits.core_pattern}"
        found.append(Finding("limits.core", "ok", told, hosts=hosts))
    return found


def _memlock(limits: Limits, hosts: tuple[str, ...], has_rdma: bool) -> list[Finding]:
    soft, hard = limits.memlock
    if not has_rdma or limits.locks_freely or soft is None or soft >= _LEAST_LOCKED:
        return []
    told = f"{soft >> 10} KiB of memory may be locked (ulimit -l), and RDMA locks its buffers"
    may_raise = hard is None or hard > soft
    cure = (
        "`ulimit -l unlimited` before submitting: Slurm passes limits on"
        if may_raise
        else "ask the site for `memlock unlimited` (limits.conf, and LimitMEMLOCK=infinity of slurmd)"
    )
    level = "error" if soft <= _HOPELESS_LOCKED else "warning"
    return [Finding("limits.memlock", level, told, cure, hosts)]  # type: ignore[arg-type]


def _limit(which: int) -> tuple[int | None, int | None]:
    soft, hard = resource.getrlimit(which)
    return (None if soft == resource.RLIM_INFINITY else soft), (None if hard == resource.RLIM_INFINITY else hard)


def _may_lock_memory(status: str) -> bool:
    """Whether CAP_IPC_LOCK, bit 14 of capabilities(7), is among the effective ones."""
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & (1 << 14))
    return False

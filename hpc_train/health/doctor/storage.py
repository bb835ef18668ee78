"""Folders that a run writes to: room, inodes, quota, and whether all nodes see the same ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster.limits import require_writable
from hpc_train.errors import LaunchError
from hpc_train.health.doctor.answers import ask, gib
from hpc_train.health.doctor.findings import Finding

# assumed: a log, a few checkpoints of a small model; what a given run needs is checked by `run` itself.
_LEAST_BYTES = 10 << 30
_HOPELESS_BYTES = 100 << 20
_LEAST_INODES = 10_000
# Of a quota, what is left before it is worth a word (assumed).
_NEARLY_FULL = 0.95
_NETWORK_TYPES = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "panfs",
    "glusterfs",
    "afs",
    "cifs",
    "smb",
    "fuse.",
    "pvfs",
    "9p",
)


@dataclass(frozen=True)
class Folder:
    """A folder that is written to, and what its file system says. purpose: "run folder", "TMPDIR", "HOME".

    path is the nearest one above the wanted folder that exists. problem: why nothing can be written there.
    """

    purpose: str
    path: str
    kind: str
    free_bytes: int
    free_inodes: int | None
    problem: str | None = None

    @property
    def is_network(self) -> bool:
        return self.kind.startswith(_NETWORK_TYPES)


@dataclass(frozen=True)
class Quota:
    """One line of a quota: what is used and the limits, in bytes or files; a limit of None is none."""

    where: str
    used_bytes: int
    limit_bytes: int | None
    used_files: int
    limit_files: int | None


def folders_of(env: Mapping[str, str], runs_dir: str) -> dict[str, str]:
    """What is looked at, by purpose."""
    found = {"run folder": runs_dir, "TMPDIR": env.get("TMPDIR") or "/tmp"}
    if env.get("HOME"):
        found["HOME"] = env["HOME"]
    if env.get("SLURM_TMPDIR"):
        found["SLURM_TMPDIR"] = env["SLURM_TMPDIR"]
    return found


def read_folder(purpose: str, wanted: str, *, trial_write: bool, mounts: str) -> Folder:
    """Ask the file system of a folder; trial_write also writes and removes a small file there.

    mounts: the text of /proc/mounts.
    """
    path = existing_parent(Path(wanted))
    try:
        stats = os.statvfs(path)
    except OSError as problem:
        return Folder(purpose, str(path), "?", 0, None, f"the file system does not answer: {problem.strerror}")
    problem_text = None
    if trial_write:
        try:
            require_writable(path, purpose, LaunchError)
        except LaunchError as problem:
            problem_text = str(problem)
    inodes = stats.f_favail if stats.f_files > 0 else None
    free = stats.f_bavail * stats.f_frsize
    return Folder(purpose, str(path), kind_of(str(path), mounts), free, inodes, problem_text)


def existing_parent(path: Path) -> Path:
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def kind_of(path: str, mounts: str) -> str:
    """The type of the file system that holds path, by the longest mount point of /proc/mounts."""
    best, kind = "", "?"
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def folder_findings(folders: Sequence[Folder], host: str) -> list[Finding]:
    """Room and inodes of each folder, and whether there is a local disk for scratch."""
    found = [finding for folder in folders for finding in _folder_findings(folder, host)]
    local = [folder for folder in folders if folder.purpose in ("TMPDIR", "SLURM_TMPDIR")]
    for folder in local:
        if folder.is_network:
            told = f"{folder.purpose} {folder.path} is on a network file system ({folder.kind}), not on a local disk"
            cure = "export TMPDIR to the node-local scratch folder of your site, or launch.env.TMPDIR=..."
            found.append(Finding("storage.scratch", "warning", told, cure, (host,)))
        elif folder.kind == "tmpfs":
            told = f"{folder.purpose} {folder.path} is in memory (tmpfs): what is written there takes the job's memory"
            found.append(Finding("storage.scratch", "note", told, hosts=(host,)))
    return found


def quota_findings(quotas: Sequence[Quota], host: str) -> list[Finding]:
    """Quotas that are spent or nearly so."""
    found = []
    for quota in quotas:
        for used, limit, unit in (
            (quota.used_bytes, quota.limit_bytes, "bytes"),
            (quota.used_files, quota.limit_files, "files"),
        ):
            if limit is None or used < _NEARLY_FULL * limit:
                continue
            amount = f"{gib(used)} of {gib(limit)}" if unit == "bytes" else f"{used} of {limit} files"
            level = "error" if used >= limit else "warning"
            told = f"the quota on {quota.where} is {'spent' if level == 'error' else 'nearly spent'}: {amount}"
            cure = "remove old files and checkpoints (checkpoint.keep keeps fewer), or set launch.runs_dir elsewhere"
            found.append(Finding("storage.quota", level, told, cure, (host,)))  # type: ignore[arg-type]
    if quotas and not found:
        places = ", ".join(sorted({quota.where for quota in quotas}))
        found.append(Finding("storage.quota", "ok", f"the quota leaves room on {places}", hosts=(host,)))
    return found


def read_quotas(folders: Sequence[Folder], user: str) -> list[Quota]:
    """Ask `quota`, and `lfs quota` for folders on Lustre; nothing where neither is installed."""
    found = parse_quota(ask(["quota", "-w", "-p"], timeout_s=5).out) if shutil.which("quota") else []
    if shutil.which("lfs"):
        for path in sorted({folder.path for folder in folders if folder.kind == "lustre"}):
            answer = ask(["lfs", "quota", "-q", "-u", user, path], timeout_s=5)
            found += parse_lfs_quota(answer.out)
    return found


def parse_quota(text: str) -> list[Quota]:
    """`quota -w -p`: a line a file system, in KiB, every column filled; a `*` says that a number is over its limit."""
    return [quota for line in text.splitlines() if (quota := _quota_line(line.split()))]


def parse_lfs_quota(text: str) -> list[Quota]:
    """`lfs quota -q`: the same columns; a long path stands on a line of its own."""
    fields: list[str] = []
    found = []
    for line in text.splitlines():
        fields += line.split()
        if quota := _quota_line(fields):
            found.append(quota)
            fields = []
    return found


def shared_findings(seen: Mapping[str, bool], path: str) -> list[Finding]:
    """Whether every node sees the file that was just made in the run folder (FC-67)."""
    blind = tuple(host for host, sees in seen.items() if not sees)
    if len(seen) < 2:
        return []
    if blind:
        told = f"{path} is not the same folder on all {len(seen)} nodes: a file made by the launching host is not seen"
        cure = "set launch.runs_dir to a folder on the shared file system, and start from there"
        return [Finding("storage.shared", "error", told, cure, blind)]
    return [Finding("storage.shared", "ok", f"all {len(seen)} nodes see the same {path}")]


def _folder_findings(folder: Folder, host: str) -> list[Finding]:
    name = f"{folder.purpose} {folder.path} ({folder.kind})"
    is_needed = folder.purpose != "HOME"
    cure = "make room, or set launch.runs_dir elsewhere" if folder.purpose == "run folder" else "make room"
    if folder.problem:
        level = "error" if is_needed else "warning"
        return [Finding("storage.write", level, f"{name}: {folder.problem}", cure, (host,))]  # type: ignore[arg-type]
    if folder.free_bytes < _HOPELESS_BYTES and is_needed:
        return [Finding("storage.space", "error", f"{name} has {gib(folder.free_bytes)} free", cure, (host,))]
    found = []
    if folder.free_bytes < _LEAST_BYTES and is_needed:
        told = f"{name} has {gib(folder.free_bytes)} free"
        found.append(Finding("storage.space", "warning", told, cure, (host,)))
    if folder.free_inodes is not None and folder.free_inodes < _LEAST_INODES:
        told = f"{name} has {folder.free_inodes} inodes left"
        found.append(Finding("storage.inodes", "warning", told, "remove small files; `df -i` counts them", (host,)))
    if not found:
        found.append(Finding("storage.space", "ok", f"{name} has room and can be written", hosts=(host,)))
    return found


def _quota_line(fields: list[str]) -> Quota | None:
    """`WHERE used soft hard grace files soft hard [grace]`; None for headings and half lines."""
    columns = [field.rstrip("*") for field in fields[1:4] + fields[5:8]]
    if len(columns) < 6 or not all(column.isdecimal() for column in columns):
        return None
    used, soft, hard, files, soft_files, hard_files = (int(column) for column in columns)
    return Quota(fields[0], used << 10, (hard or soft) << 10 or None, files, hard_files or soft_files or None)

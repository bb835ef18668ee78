"""On which kind of file system a path lies: this node's own disk, or one that all nodes share."""

from __future__ import annotations

import os
from pathlib import Path

# cited: the names that the kernel gives them in /proc/self/mountinfo.
_SHARED = {
    "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "fhgfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
    "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
}  # fmt: skip
_OCTAL = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}


def file_system_of(path: Path, mountinfo: str | None = None) -> str | None:
    """The kernel's name of the file system under `path`, which need not exist; None where it cannot be told."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return None
    real = os.path.realpath(path)
    best: tuple[int, str] | None = None
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        if len(fields.split()) < 5 or not tail:
            continue
        place = fields.split()[4]
        for code, letter in _OCTAL.items():
            place = place.replace(code, letter)
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        # Of two mounts on one place, the later one is seen.
        if inside and (best is None or len(place) >= best[0]):
            best = (len(place), tail.split()[0])
    return best[1] if best else None


def is_shared(path: Path, mountinfo: str | None = None) -> bool:
    """Whether `path` is known to lie on a network's file system. Not knowing is no."""
    name = file_system_of(path, mountinfo)
    return name is not None and (name in _SHARED or name.partition(".")[2] in _SHARED)

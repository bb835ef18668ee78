"""Which MPI library this Python would load, what PMI the site's srun offers, and which of these fit.

A mismatch starts every task as a world of its own, so the plugin is chosen, with the reason said.
"""

from __future__ import annotations

import mmap
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import LaunchError

# cited: mpi4py's search order of names in each folder.
_NAMES = ("libmpi.so", "libmpi.so.12", "libmpi.so.40")
_SYSTEM_FOLDERS = (
    "/usr/local/lib",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib",
)
_OPEN_MPI = re.compile(rb"(?:Open MPI v|openmpi-|Open MPI \S+ \S+ MCA component version )([0-9]+)\.")
_MPICH_MARKS = (b"MPICH Version", b"MPICH Custom Information", b"MPICH %s", b"CRAY MPICH", b"MVAPICH Version")
_INTEL_MARK = b"Intel(R) MPI Library"
# cited: Open MPI's VERSION files: 4.1 is libmpi.so.40.30, 5.0 is libmpi.so.40.40.
_OPEN_MPI_5_REVISION = 40
SPOKEN = {"openmpi5": "Open MPI 5", "openmpi4": "Open MPI before 5", "mpich": "MPICH", "unknown": "of an unknown kind"}


@dataclass(frozen=True)
class MpiLibrary:
    """kind is "openmpi5" (5 or later), "openmpi4" (4 or earlier), "mpich", or "unknown"."""

    kind: str
    path: Path | None
    reason: str


def parse_mpi_list(text: str) -> tuple[str, ...]:
    """Read `srun --mpi=list`, standard output and error together: plugins, then versions of pmix.

    Releases differ: lines with or without `srun: ` before them, versions on a line of their own.
    """
    plugins: list[str] = []
    for line in text.splitlines():
        line = line.strip().removeprefix("srun:").strip()
        head, _, tail = line.partition(":")
        if head.startswith("specific") and "versions available" in head:
            plugins.extend(re.split(r"[,\s]+", tail.strip()))
        elif re.fullmatch(r"[a-z][a-z0-9_]*", line):
            plugins.append(line)
    return tuple(dict.fromkeys(name for name in plugins if name))


def parse_mpi_default(text: str) -> str | None:
    """Read MpiDefault from `scontrol show config`; None where it says none, or nothing."""
    match = re.search(r"^MpiDefault\s*=\s*(\S+)", text, re.MULTILINE)
    return None if match is None or match.group(1) in ("none", "(null)") else match.group(1)


def choose_mpi(
    plugins: Sequence[str], library: str, site_default: str | None = None, override: str | None = None
) -> tuple[str, str]:
    """Choose srun's --mpi plugin for a kind of MPI library; returns it and the reason.

    Raises:
        LaunchError: The plugin asked for is not offered, or none that is offered fits the library.
    """
    offered = ", ".join(plugins) or "nothing"
    if override is not None:
        if override not in plugins:
            raise LaunchError(
                f"launch.mpi={override} was asked for, but `srun --mpi=list` offers {offered}. Choose one of those."
            )
        return override, "as asked"
    if library == "unknown":
        if site_default is not None:
            return site_default, "the site's default, since the MPI library is not known"
        fitting = [name for name in ("pmix", "cray_shasta", "pmi2") if name in plugins]
        if not fitting:
            raise LaunchError(
                f"`srun --mpi=list` offers {offered}: no plugin that could connect the ranks of an MPI library. "
                "Choose one with launch.mpi=NAME, or ask the site how MPI programs are started."
            )
        return fitting[0], "the first that is offered, since neither library nor site default are known"
    wanted = {
        "openmpi5": ("pmix",),
        "openmpi4": ("pmix", "pmi2"),
        "mpich": ("pmi2", "cray_shasta"),
    }[library]
    if site_default is not None and site_default.partition("_v")[0] in wanted:
        return site_default, f"the site's default, which fits {SPOKEN[library]}"
    for name in wanted:
        versions = [plugin for plugin in plugins if plugin == name or plugin.startswith(f"{name}_v")]
        if versions:
            return versions[0], f"{SPOKEN[library]} needs it"
    raise LaunchError(
        f"{SPOKEN[library]} needs one of {', '.join(wanted)}, but `srun --mpi=list` offers {offered}: every task "
        "would be a world of its own. Load the site's own MPI module and set MPI4PY_LIBMPI to its libmpi.so, or "
        "ask the site for that plugin."
    )


def find_mpi_library(
    env: Mapping[str, str], prefix: str = sys.prefix, system_folders: Sequence[str] = _SYSTEM_FOLDERS
) -> MpiLibrary:
    """Find the library that mpi4py would load, without loading it.

    MPI4PY_LIBMPI, then the folder lib of prefix (where wheels put it), then LD_LIBRARY_PATH and the
    system's folders. MPI4PY_MPIABI settles the brand where the file does not tell.
    """
    named = env.get("MPI4PY_LIBMPI")
    if named:
        folders, origin = named.split(":"), f"MPI4PY_LIBMPI={named}"
    else:
        folders, origin = [f"{prefix}/lib"], f"the wheel in {prefix}"
    path = _first_library(folders)
    if path is None and named:
        raise LaunchError(
            f"MPI4PY_LIBMPI={named} names no library that is here. Load the module that sets it, or unset it."
        )
    if path is None:
        inherited = [folder for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder]
        path, origin = _first_library([*inherited, *system_folders]), "the system"
    abi = re.sub(r"[ _-]", "", env.get("MPI4PY_MPIABI", "")).lower()
    if path is None:
        return MpiLibrary("unknown", None, "no libmpi was found")
    kind = _kind(path)
    if kind == "unknown" and abi in ("mpich", "impi"):
        kind = "mpich"
    return MpiLibrary(kind, path, f"{path}, from {origin}")


def file_has(path: Path, text: bytes) -> bool:
    """Whether a library's file has this text somewhere; false where it cannot be read."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text) >= 0
    except (OSError, ValueError):
        return False


def _first_library(folders: Sequence[str]) -> Path | None:
    for folder in folders:
        entry = Path(folder).expanduser()
        candidates = [entry / name for name in _NAMES] if entry.is_dir() else [entry]
        for candidate in candidates:
            if _is_elf(candidate):
                return candidate
    return None


def _is_elf(path: Path) -> bool:
    """A wheel's libmpi.so is a text that only a linker understands; the loader passes it over."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def _kind(path: Path) -> str:
    """Tell brand and version by the text that every build carries; the file's name gives neither."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(b"ompi_mpi_comm_self") >= 0:
                if match := _OPEN_MPI.search(content):
                    return "openmpi5" if int(match.group(1)) >= 5 else "openmpi4"
                revision = re.search(r"\.so\.40\.([0-9]+)", path.resolve().name)
                is_old = revision is not None and int(revision.group(1)) < _OPEN_MPI_5_REVISION
                return "openmpi4" if is_old else "openmpi5"
            is_mpich = any(content.find(mark) >= 0 for mark in _MPICH_MARKS)
            return "mpich" if is_mpich and content.find(_INTEL_MARK) < 0 else "unknown"
    except (OSError, ValueError):
        return "unknown"

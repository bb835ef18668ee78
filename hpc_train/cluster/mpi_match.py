"""Whether an MPI library and a process manager interface (PMI) speak to each other, before anybody tries.

A mismatch shows in one of two bad ways: every task is a world of its own, or MPI ends the process while it
starts, with words that help nobody. So what can be known from the library's file is asked here first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hpc_train.cluster.mpi_site import SPOKEN, MpiLibrary, file_has
from hpc_train.errors import LaunchError

_MODULE_BRANDS = (
    ("openmpi", re.compile(r"open-?mpi|ompi", re.IGNORECASE)),
    ("mpich", re.compile(r"(cray-)?mpich.*|mvapich.*|i(ntel-?)?mpi|intel-oneapi-mpi|psmpi", re.IGNORECASE)),
)
_PMI_NAMES = {"pmix": "PMIx", "pmi2": "PMI2"}


def speaks(library: MpiLibrary, plugin: str) -> bool | None:
    """Whether a library understands what srun's --mpi plugin offers; None where its file does not tell.

    cited: Open MPI dropped PMI1 and PMI2 with release 5. Open MPI 4 has a component for them, and MPICH a
    dependency on libpmix, only where they were built for that.
    """
    kind = plugin.partition("_v")[0]
    if kind not in _PMI_NAMES or library.path is None:
        return None
    if library.kind == "openmpi5":
        return kind == "pmix"
    if library.kind == "openmpi4":
        return True if kind == "pmix" else _has_pmi2_component(library.path)
    if library.kind == "mpich":
        return True if kind == "pmi2" else file_has(library.path, b"libpmix.so")
    return None


def offered_pmi(env: Mapping[str, str]) -> str | None:
    """What srun offers this task, from its variables: "pmix", "pmi2" or "none"; None where that is not known."""
    if env.get("PMIX_NAMESPACE") or env.get("PMIX_RANK"):
        return "pmix"
    if env.get("PMI_FD"):
        return "pmi2"
    # Slurm up to 23.02 names its plugin; others than these may connect ranks in ways of their own.
    return "none" if env.get("SLURM_MPI_TYPE") == "none" else None


def require_match(library: MpiLibrary, plugin: str) -> None:
    """Refuse a library and a plugin of which it is certain that they do not speak to each other.

    Raises:
        LaunchError: with what to do.
    """
    is_certain = speaks(library, plugin) is False or (plugin == "none" and library.kind != "unknown")
    if not is_certain:
        return
    fitting = [name for name in _PMI_NAMES if speaks(library, name)]
    name = _PMI_NAMES.get(plugin.partition("_v")[0])
    what = f"does not speak {name}, which is what srun --mpi={plugin} offers" if name else "needs more than --mpi=none"
    raise LaunchError(
        f"{SPOKEN[library.kind]} ({library.reason}) {what}: its ranks would not find each other. Start with "
        f"{' or '.join(f'--mpi={name}' for name in fitting)} (hpc-train run --mpi {fitting[0]}; `srun --mpi=list` "
        "shows what this site offers), or load the site's MPI module of a brand that speaks it and set MPI4PY_LIBMPI "
        "to its libmpi.so"
    )


def other_brand_module(env: Mapping[str, str], library: MpiLibrary) -> str | None:
    """A sentence where a loaded module is of another brand of MPI than the library that ranks will load."""
    if library.kind == "unknown":
        return None
    for module in filter(None, env.get("LOADEDMODULES", "").split(":")):
        name = module.rpartition("/")[0].rpartition("/")[2] or module
        for brand, pattern in _MODULE_BRANDS:
            if pattern.fullmatch(name) and not library.kind.startswith(brand):
                return (
                    f"the module {module} is loaded, but the ranks load another brand, {SPOKEN[library.kind]}: "
                    f"{library.reason}. To use the module's, set MPI4PY_LIBMPI to its libmpi.so; else unload it"
                )
    return None


def _has_pmi2_component(library: Path) -> bool:
    folder = library.resolve().parent
    if any((folder / "openmpi").rglob("mca_pmix_s[12].so")):
        return True
    return any(file_has(path, b"PMI2_Init") for path in (library, *folder.glob("libopen-pal.so*")))

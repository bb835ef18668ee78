"""Three MPI libraries on one machine: Open MPI 5 and MPICH from wheels, Open MPI 4 from Debian."""

from __future__ import annotations

import sys
from pathlib import Path

from hpc_train.cluster.mpi_site import find_mpi_library

LIBRARIES = {
    "openmpi5": Path(sys.prefix, "lib/libmpi.so.40"),
    "openmpi4": Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40"),
    "mpich": Path(sys.prefix, "opt/mpich/lib/libmpi.so.12"),
}
"""By kind; where env/setup_venv.sh and env/setup_system.sh put them."""


def skip_reason() -> str | None:
    """Why the brands cannot be compared here; None where all are there and are what they should be."""
    for kind, path in LIBRARIES.items():
        if not path.exists():
            return f"no {kind}: {path} is missing (env/setup_system.sh, env/setup_venv.sh --extras test)"
        found = find_mpi_library({"MPI4PY_LIBMPI": str(path)}).kind
        if found != kind:
            return f"{path} is {found}, not {kind}"
    return None


def environment(kind: str) -> dict[str, str]:
    """What a site's MPI module would set."""
    return {"MPI4PY_LIBMPI": str(LIBRARIES[kind])}

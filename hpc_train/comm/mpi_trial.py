"""One task of the doctor's trial: start MPI, meet the others, exchange a message, print what was seen as JSON.

`--no-init` loads the library without starting it, which works anywhere and tells its version.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_train.cluster.long_lines import in_pieces
from hpc_train.errors import ExitCode

MARK = "hpc_train_mpi_trial"
_MESSAGE_BYTES = 1 << 20
# Open MPI's component files and MPICH's netmod libraries, by what they move bytes with.
_TRANSPORTS = {"libucp": "ucx", "libfabric": "ofi", "libpsm2": "psm2", "mca_btl_openib": "openib"}


def main(arguments: Sequence[str]) -> int:
    """Print what was seen, as JSON; the exit code is 0 where MPI could be used, else 3."""
    host = socket.gethostname()
    facts: dict[str, Any] = {"host": host}
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        facts |= {"mpi4py": mpi4py.__version__, "library": MPI.Get_library_version().splitlines()[0].strip("\0 ")}
        facts["libraries"] = loaded_libraries(Path("/proc/self/maps").read_text())
        if "--no-init" not in arguments:
            MPI.Init()
            facts |= _meet(MPI)
    except Exception as error:
        facts["error"] = f"{type(error).__name__}: {error}".strip()
    sys.stdout.write(in_pieces(MARK, f"{host}:{os.getpid()}", json.dumps(facts)))
    sys.stdout.flush()
    return int(ExitCode.DONE) if "error" not in facts else int(ExitCode.LAUNCH)


def loaded_libraries(maps: str) -> list[str]:
    """The libraries of /proc/self/maps that carry MPI, PMI or a transport."""
    paths = {line.rpartition(" ")[2] for line in maps.splitlines() if "/" in line}
    wanted = ("libmpi", "libpmi", "libpmix", *_TRANSPORTS)
    return sorted(path for path in paths if path.rpartition("/")[2].startswith(wanted))


def _meet(mpi: Any) -> dict[str, Any]:
    """Collective over all tasks of the launcher. A network on which nothing arrives hangs here, and not later."""
    world = mpi.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    message, answer = bytes([rank % 256]) * _MESSAGE_BYTES, bytearray(_MESSAGE_BYTES)
    world.Sendrecv(message, dest=(rank + 1) % size, recvbuf=answer, source=(rank - 1) % size)
    if answer != bytes([(rank - 1) % size % 256]) * _MESSAGE_BYTES:
        raise RuntimeError(f"a message of {_MESSAGE_BYTES} bytes from rank {(rank - 1) % size} arrived damaged")
    hosts = world.allgather(socket.gethostname())
    # What is loaded only when it is first used is seen now.
    libraries = loaded_libraries(Path("/proc/self/maps").read_text())
    names = {
        name for path in libraries for mark, name in _TRANSPORTS.items() if path.rpartition("/")[2].startswith(mark)
    }
    mpi.Finalize()
    return {"rank": rank, "size": size, "hosts": hosts, "libraries": libraries, "loaded": sorted(names)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

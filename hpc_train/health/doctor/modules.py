"""Environment modules, conda and library paths: what was loaded, and whether it is what will be used."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_train.cluster.mpi_site import MpiLibrary
from hpc_train.health.doctor.findings import Finding

# Names of modules by what they bring; the kind is that of cluster.mpi_site, where one module is one kind.
_MPI_MODULES = {
    "openmpi": ("openmpi5", "openmpi4"),
    "ompi": ("openmpi5", "openmpi4"),
    "hpcx": ("openmpi5", "openmpi4"),
    "mpich": ("mpich",),
    "cray-mpich": ("mpich",),
    "mvapich": ("mpich",),
    "mvapich2": ("mpich",),
    "psmpi": ("mpich",),
    "parastationmpi": ("mpich",),
    "impi": ("mpich", "unknown"),
    "intel-mpi": ("mpich", "unknown"),
    "intelmpi": ("mpich", "unknown"),
}
_SPOKEN = {"openmpi5": "Open MPI 5", "openmpi4": "Open MPI before 5", "mpich": "MPICH", "unknown": "an unknown MPI"}


def loaded_modules(env: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in env.get("LOADEDMODULES", "").split(":") if name)


def mpi_modules(modules: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The loaded modules that bring an MPI library, and the kinds of library that they may be."""
    found = {}
    for module in modules:
        # Open MPI/4.1.5-GCC, openmpi/5.0.3, mpi/openmpi-x86_64: the name is one of the parts.
        for part in module.lower().split("/"):
            name = re.split(r"[-_]?(?=[0-9])|-x86|-gcc|-intel|-nv|-cuda", part)[0]
            if name in _MPI_MODULES:
                found[module] = _narrowed(_MPI_MODULES[name], module)
                break
    return found


def module_findings(env: Mapping[str, str], library: MpiLibrary | None, torch_cuda: str | None) -> list[Finding]:
    """What of the loaded modules will not be used, or will be in the way."""
    modules = loaded_modules(env)
    found = [*_mpi_findings(modules, env, library), *_conda_findings(modules, env)]
    cuda = [module for module in modules if module.lower().split("/")[0] in ("cuda", "cudatoolkit", "nvhpc")]
    if cuda and torch_cuda:
        told = f"{', '.join(cuda)} is loaded; torch brings its own CUDA {torch_cuda} and does not use it"
        found.append(Finding("modules.cuda", "note", told))
    found += _path_findings(env, library)
    if modules and not found:
        found.append(Finding("modules.loaded", "ok", f"loaded: {', '.join(modules)}"))
    if not modules and not found:
        found.append(Finding("modules.loaded", "ok", "no environment modules are loaded"))
    return found


def _mpi_findings(modules: Sequence[str], env: Mapping[str, str], library: MpiLibrary | None) -> list[Finding]:
    brought = mpi_modules(modules)
    found = []
    if len(brought) > 1:
        told = f"several MPI modules are loaded: {', '.join(brought)}"
        found.append(Finding("modules.mpi", "warning", told, "keep one: `module unload` the others"))
    if library is None or library.path is None:
        return found
    for module, kinds in brought.items():
        if library.kind in kinds:
            continue
        told = (
            f"module {module} is loaded ({_SPOKEN[kinds[0]]}), but mpi4py will load {_SPOKEN[library.kind]} from "
            f"{library.path}: an MPI of another brand or version than the module's"
        )
        cure = "set MPI4PY_LIBMPI to the module's libmpi.so, or unload the module"
        found.append(Finding("modules.mpi", "warning", told, cure))
    return found


def _conda_findings(modules: Sequence[str], env: Mapping[str, str]) -> list[Finding]:
    prefix = env.get("CONDA_PREFIX")
    pythons = [module for module in modules if module.lower().split("/")[0] in ("python", "python3", "scipy-bundle")]
    found = []
    if prefix and pythons:
        told = (
            f"a conda environment ({prefix}) and {', '.join(pythons)} are active together: PATH decides which is used"
        )
        found.append(
            Finding("modules.conda", "warning", told, "use one of them: `conda deactivate`, or `module unload`")
        )
    if prefix and env.get("PYTHONPATH") and pythons:
        told = f"PYTHONPATH={env['PYTHONPATH']} of the modules comes before conda's own packages"
        found.append(Finding("modules.conda", "warning", told, "unset PYTHONPATH inside the conda environment"))
    if prefix and any(Path(folder) == Path(prefix) / "lib" for folder in _library_path(env)):
        told = f"LD_LIBRARY_PATH holds {prefix}/lib: every program, also srun, then takes conda's libraries"
        found.append(
            Finding("modules.conda", "warning", told, "take it out of LD_LIBRARY_PATH; conda does not need it")
        )
    return found


def _path_findings(env: Mapping[str, str], library: MpiLibrary | None) -> list[Finding]:
    """A libmpi that LD_LIBRARY_PATH names, while mpi4py takes another one."""
    if library is None or library.path is None:
        return []
    for folder in _library_path(env):
        there = [
            path for name in ("libmpi.so.40", "libmpi.so.12", "libmpi.so") if (path := Path(folder) / name).exists()
        ]
        if there and there[0].resolve() != library.path.resolve():
            told = f"LD_LIBRARY_PATH comes upon {there[0]} first, but mpi4py will load {library.path}"
            cure = (
                f"export MPI4PY_LIBMPI={there[0]} if the former is the site's MPI; else take {folder} out of the path"
            )
            return [Finding("modules.library_path", "warning", told, cure)]
        if there:
            return []
    return []


def _library_path(env: Mapping[str, str]) -> list[str]:
    return [folder for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder]


def _narrowed(kinds: tuple[str, ...], module: str) -> tuple[str, ...]:
    """openmpi/5.0.3 can only be Open MPI 5."""
    if "openmpi5" not in kinds or not (match := re.search(r"(?:openmpi|ompi)[-/_]?([0-9]+)\.", module.lower())):
        return kinds
    return ("openmpi5",) if int(match[1]) >= 5 else ("openmpi4",)

"""Which MPI library speaks which PMI, told from its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cluster.mpi_match import offered_pmi, other_brand_module, require_match, speaks
from hpc_train.cluster.mpi_site import MpiLibrary
from hpc_train.errors import ExitCode, LaunchError


def library(folder: Path, kind: str, content: bytes = b"") -> MpiLibrary:
    path = folder / "libmpi.so.40"
    path.write_bytes(b"\x7fELF" + content)
    return MpiLibrary(kind, path, f"{path}, from a test")


@pytest.mark.parametrize(
    ("kind", "content", "pmix", "pmi2"),
    [
        ("openmpi5", b"", True, False),
        ("openmpi4", b"", True, False),
        ("openmpi4", b"PMI2_Init", True, True),
        ("mpich", b"PMI2_Init", False, True),
        ("mpich", b"libpmix.so.2", True, True),
        ("unknown", b"", None, None),
    ],
)
def test_what_a_library_speaks(kind: str, content: bytes, pmix: bool, pmi2: bool, tmp_path: Path) -> None:
    found = library(tmp_path, kind, content)
    assert (speaks(found, "pmix"), speaks(found, "pmix_v4"), speaks(found, "pmi2")) == (pmix, pmix, pmi2)
    assert speaks(found, "cray_shasta") is None


def test_open_mpi_4_speaks_pmi2_where_it_has_the_component(tmp_path: Path) -> None:
    found = library(tmp_path, "openmpi4")
    (tmp_path / "openmpi/lib/openmpi3").mkdir(parents=True)
    assert speaks(found, "pmi2") is False
    (tmp_path / "openmpi/lib/openmpi3/mca_pmix_s2.so").touch()
    assert speaks(found, "pmi2") is True


def test_only_what_is_certain_is_refused(tmp_path: Path) -> None:
    mpich, unknown = library(tmp_path, "mpich"), MpiLibrary("unknown", None, "no libmpi was found")
    with pytest.raises(LaunchError, match=r"MPICH .* does not speak PMIx.*hpc-train run --mpi pmi2") as refusal:
        require_match(mpich, "pmix_v4")
    assert refusal.value.exit_code == ExitCode.LAUNCH
    with pytest.raises(LaunchError, match="needs more than --mpi=none"):
        require_match(mpich, "none")
    for plugin in ("pmi2", "cray_shasta", "a_sites_own"):
        require_match(mpich, plugin)
    for plugin in ("pmi2", "pmix", "none"):
        require_match(unknown, plugin)


def test_a_task_tells_what_srun_offers_it() -> None:
    assert offered_pmi({"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.9.0", "SLURM_MPI_TYPE": "pmix"}) == "pmix"
    assert offered_pmi({"PMI_FD": "11", "PMI_RANK": "0"}) == "pmi2"
    assert offered_pmi({"SLURM_MPI_TYPE": "none"}) == "none"
    assert offered_pmi({"PALS_RANKID": "0"}) is None


@pytest.mark.parametrize(
    ("modules", "kind", "named"),
    [
        ("gcc/12:mpich/4.2.1", "openmpi5", "mpich/4.2.1"),
        ("OpenMPI/4.1.5-GCC-12", "mpich", "OpenMPI/4.1.5-GCC-12"),
        ("mpi/openmpi/5.0", "mpich", "mpi/openmpi/5.0"),
        ("cray-mpich-abi/8.1", "openmpi4", "cray-mpich-abi/8.1"),
        ("intel-oneapi-mpi/2021", "openmpi4", "intel-oneapi-mpi/2021"),
        ("openmpi/5.0", "openmpi4", None),
        ("impi/2021", "mpich", None),
        ("mpich/4", "unknown", None),
        ("", "mpich", None),
    ],
)
def test_a_loaded_module_of_another_brand_is_named(modules: str, kind: str, named: str | None, tmp_path: Path) -> None:
    told = other_brand_module({"LOADEDMODULES": modules}, library(tmp_path, kind))
    assert (told is None) if named is None else (told is not None and f"the module {named} is loaded" in told)

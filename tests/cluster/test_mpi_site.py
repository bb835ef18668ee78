from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cluster.mpi_site import choose_mpi, find_mpi_library, parse_mpi_default, parse_mpi_list
from hpc_train.errors import LaunchError
from tests.cluster.recorded import DATA

OLD = "srun: MPI types are...\nsrun: cray_shasta\nsrun: pmi2\nsrun: none\nsrun: pmix_v3\n"
NEW = (
    "MPI plugin types are...\n\tcray_shasta\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: "
    "pmix_v4,pmix_v5\n"
)


@pytest.mark.parametrize(
    ("text", "plugins"),
    [
        ((DATA / "mpi_list.txt").read_text(), "pmix none cray_shasta pmi2 pmix_v4"),
        (NEW, "cray_shasta none pmi2 pmix pmix_v4 pmix_v5"),
        (OLD, "cray_shasta pmi2 none pmix_v3"),
        ("srun: error: no configuration\n", ""),
        ("", ""),
    ],
)
def test_the_list_of_plugins_is_read_from_every_release(text: str, plugins: str) -> None:
    assert parse_mpi_list(text) == tuple(plugins.split())


def test_the_sites_default_is_read() -> None:
    assert parse_mpi_default("MpiDefault              = pmix\nMpiParams = (null)") == "pmix"
    assert parse_mpi_default("MpiDefault              = none\n") is None
    assert parse_mpi_default("") is None


ALL = ("pmix", "none", "cray_shasta", "pmi2", "pmix_v4")


@pytest.mark.parametrize(
    ("plugins", "library", "site_default", "override", "chosen"),
    [
        (ALL, "openmpi5", None, None, "pmix"),
        (ALL, "openmpi5", "pmix_v4", None, "pmix_v4"),
        (ALL, "openmpi5", "pmi2", None, "pmix"),
        (ALL, "openmpi4", "pmi2", None, "pmi2"),
        (ALL, "openmpi4", None, None, "pmix"),
        (("pmi2", "none"), "openmpi4", None, None, "pmi2"),
        (("pmix_v3", "none"), "openmpi5", None, None, "pmix_v3"),
        (ALL, "mpich", None, None, "pmi2"),
        (ALL, "mpich", "pmix", None, "pmi2"),
        (ALL, "mpich", "cray_shasta", None, "cray_shasta"),
        (ALL, "unknown", "cray_shasta", None, "cray_shasta"),
        (ALL, "unknown", None, None, "pmix"),
        (ALL, "openmpi5", "pmix", "pmi2", "pmi2"),
    ],
)
def test_the_plugin_fits_the_library(
    plugins: tuple[str, ...], library: str, site_default: str | None, override: str | None, chosen: str
) -> None:
    """FC-09"""
    assert choose_mpi(plugins, library, site_default, override)[0] == chosen


@pytest.mark.parametrize(
    ("plugins", "library", "override", "words"),
    [
        (("pmi2", "none"), "openmpi5", None, "Open MPI 5 needs one of pmix, but .* offers pmi2, none"),
        (("pmix", "none"), "mpich", None, "MPICH needs one of pmi2"),
        (("none",), "unknown", None, "no plugin"),
        (ALL, "openmpi5", "pmix_v9", "launch.mpi=pmix_v9"),
    ],
)
def test_a_site_without_a_fitting_plugin_is_refused_before_anything_starts(
    plugins: tuple[str, ...], library: str, override: str | None, words: str
) -> None:
    """FC-09"""
    with pytest.raises(LaunchError, match=words):
        choose_mpi(plugins, library, override=override)


def library(path: Path, text: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF" + bytes(64) + text + bytes(64))
    return path


@pytest.mark.parametrize(
    ("file_name", "text", "kind"),
    [
        ("libmpi.so.40", b"ompi_mpi_comm_self\0Open MPI tuned collective MCA component version 5.0.11", "openmpi5"),
        ("libmpi.so.40", b"ompi_mpi_comm_self\0Open MPI v4.1.4, package: Debian", "openmpi4"),
        ("libmpi.so.40", b"ompi_mpi_comm_self\0/build/openmpi-6.0.0/ompi/x.c", "openmpi5"),
        ("libmpi.so.40.30.4", b"ompi_mpi_comm_self", "openmpi4"),
        ("libmpi.so.12", b"MPICH Version:      4.1", "mpich"),
        ("libmpi.so.12", b"MPICH Custom Information:", "mpich"),
        ("libmpi.so.12", b"MPICH Version\0Intel(R) MPI Library 2021", "unknown"),
        ("libmpi.so.12", b"something else", "unknown"),
    ],
)
def test_brand_and_version_are_read_from_the_library_itself(
    tmp_path: Path, file_name: str, text: bytes, kind: str
) -> None:
    path = library(tmp_path / file_name, text)
    assert find_mpi_library({"MPI4PY_LIBMPI": str(path)}).kind == kind


def test_the_sites_library_comes_before_the_wheels_and_the_wheels_before_the_systems(tmp_path: Path) -> None:
    site = library(tmp_path / "site/libmpi.so.12", b"MPICH Version: 4")
    wheel = library(tmp_path / "venv/lib/libmpi.so.40", b"ompi_mpi_comm_self Open MPI v5.0")
    loaded = library(tmp_path / "loaded/libmpi.so.40", b"Open MPI v4.1")
    system = library(tmp_path / "system/libmpi.so.40", b"Open MPI v4.0")
    # What a wheel has under this name is a text for linkers.
    (tmp_path / "venv/lib/libmpi.so").write_text("INPUT(libmpi.so.40)\n")

    def find(**env: str) -> Path | None:
        return find_mpi_library(env, str(tmp_path / "venv"), [str(tmp_path / "system")]).path

    assert find(MPI4PY_LIBMPI=str(site)) == site
    assert find(MPI4PY_LIBMPI=str(site.parent)) == site
    assert find(LD_LIBRARY_PATH=str(loaded.parent)) == wheel
    wheel.unlink()
    assert find(LD_LIBRARY_PATH=f":{loaded.parent}") == loaded
    assert find() == system
    system.unlink()
    assert find() is None


def test_a_named_library_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """FC-92"""
    with pytest.raises(LaunchError, match="MPI4PY_LIBMPI"):
        find_mpi_library({"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")})


def test_the_abi_variable_settles_a_library_that_does_not_tell(tmp_path: Path) -> None:
    path = library(tmp_path / "libmpi.so.12", b"")
    assert find_mpi_library({"MPI4PY_LIBMPI": str(path), "MPI4PY_MPIABI": "mpich"}).kind == "mpich"

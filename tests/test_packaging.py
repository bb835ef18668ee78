"""The wheel carries all that hpc_train needs, and an installed hpc_train works without its source tree."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_NOT_SOURCE = [".git", ".venv", "build", "dist", "runs", "demo", "tests", "*.egg-info", "__pycache__", ".*_cache"]
# Folders beside the package that are installed inside it, if they are there.
_SHARED = ["slurm", "env", "ext"]


@dataclass(frozen=True)
class Installed:
    """hpc_train installed from its wheel into a folder of its own."""

    target: Path

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(self.target)}
        return _call([sys.executable, *arguments], env=env, cwd=self.target.parent)


def _call(command: Sequence[str], env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("packaging")
    # A copy, since setuptools writes into the tree that it builds.
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*_NOT_SOURCE))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--quiet"]
    env = dict(os.environ)
    _call([*pip, "wheel", *offline, "--no-build-isolation", "-w", str(folder), str(source)], env, folder)
    (wheel,) = folder.glob("hpc_train-*.whl")
    target = folder / "site"
    _call([*pip, "install", *offline, "--target", str(target), str(wheel)], env, folder)
    shutil.rmtree(source)
    return Installed(target)


def _metadata() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_every_folder_with_sources_is_listed_in_setup_cfg() -> None:
    listed = set(_metadata()["options"]["packages"].split())
    folders = {path.parent for path in (ROOT / "hpc_train").rglob("*.py")}
    present = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    present |= {f"hpc_train._share.{name}" for name in _SHARED if (ROOT / name).is_dir()}
    recipes = ROOT / "hpc_train" / "recipes"
    present |= {"hpc_train.recipes"} if recipes.is_dir() else set()
    assert listed == present


def test_the_module_runs_when_installed(installed: Installed) -> None:
    where = installed.python("-c", "import hpc_train; print(hpc_train.__file__)").stdout
    assert Path(where.strip()).is_relative_to(installed.target)
    assert "usage: hpc-train" in installed.python("-m", "hpc_train", "--help").stdout


def test_the_command_is_installed(installed: Installed) -> None:
    done = installed.python(str(installed.target / "bin" / "hpc-train"), "--help")
    assert "usage: hpc-train" in done.stdout


def test_the_version_is_that_of_setup_cfg(installed: Installed) -> None:
    version = _metadata()["metadata"]["version"]
    assert installed.python("-c", "import hpc_train; print(hpc_train.__version__)").stdout.strip() == version
    metadata = "import importlib.metadata as m; print(m.version('hpc_train'))"
    assert installed.python("-c", metadata).stdout.strip() == version


def _tracked(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path.relative_to(folder) for path in files)


@pytest.mark.parametrize("name", [name for name in _SHARED if (ROOT / name).is_dir()])
def test_folders_beside_the_package_are_installed_with_it(installed: Installed, name: str) -> None:
    inside = installed.target / "hpc_train" / "_share" / name
    assert _tracked(inside) == _tracked(ROOT / name)
    for path in _tracked(ROOT / name):
        assert os.access(inside / path, os.X_OK) == os.access(ROOT / name / path, os.X_OK), path


def test_recipes_and_the_typing_mark_are_installed(installed: Installed) -> None:
    recipes = [path.name for path in (ROOT / "hpc_train" / "recipes").glob("*.yaml")]
    assert "tiny.yaml" in recipes
    assert sorted(path.name for path in (installed.target / "hpc_train" / "recipes").glob("*.yaml")) == sorted(recipes)
    assert (installed.target / "hpc_train" / "py.typed").exists()


def test_an_installed_plan_draws_its_page(installed: Installed) -> None:
    page = installed.target.parent / "plan.html"
    words = ["plan", "tiny", "-N", "1", "--fabric", "clos:pods=1,nodes=1,gpus=4", "--html", str(page)]
    assert "4 ranks on 1 node" in installed.python("-m", "hpc_train", *words).stdout
    assert page.read_text().rstrip().endswith("</html>")


def test_an_installed_config_is_found_from_any_folder(installed: Installed) -> None:
    recipe = installed.target / "hpc_train" / "recipes" / "tiny.yaml"
    code = f"from hpc_train.config_read import load_config; print(load_config({str(recipe)!r}, []).name)"
    assert installed.python("-c", code).stdout.strip()

"""What of an environment is packed, and that it works where it is unpacked."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hpc_train.cluster.mounts import file_system_of, is_shared
from hpc_train.config import LaunchConfig
from hpc_train.errors import ConfigError, LaunchError
from hpc_train.launch.ranks import MpirunLauncher, SrunLauncher
from hpc_train.launch.stage_env import Staged, stage_environment, stage_for_ranks
from hpc_train.launch.stage_pack import Interpreter, lay_out, pack

RELEASE = f"python{sys.version_info.major}.{sys.version_info.minor}"
MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / /home rw - nfs4 server:/home rw
31 22 0:41 / /scratch\\040space rw,noatime shared:9 - lustre mgs:/x rw
32 30 0:42 / /home/local rw - xfs /dev/sdb rw
33 22 0:43 / /fuse rw - fuse.glusterfs x rw
"""


@pytest.mark.parametrize(
    ("path", "name", "shared"),
    [
        ("/etc", "ext4", False),
        ("/home/me/x", "nfs4", True),
        ("/homestead", "ext4", False),
        ("/scratch space/me", "lustre", True),
        ("/home/local/me", "xfs", False),
        ("/fuse/me", "fuse.glusterfs", True),
    ],
)
def test_the_file_system_of_a_path(path: str, name: str, shared: bool) -> None:
    assert file_system_of(Path(path), MOUNTS) == name
    assert is_shared(Path(path), MOUNTS) is shared


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    return tmp_path / "venv"


def packages(venv: Path) -> Path:
    return venv / "lib" / RELEASE / "site-packages"


def interpreter(venv: Path, *python_path: Path) -> Interpreter:
    return Interpreter(venv, Path(sys.base_prefix), venv / "bin/python", RELEASE, python_path)


def unpack(python: Interpreter, folder: Path) -> Path:
    """Pack, unpack elsewhere, and do what the node does with pyvenv.cfg; the staged Python."""
    tar = pack(lay_out(python), folder / "cache")
    with tarfile.open(tar) as file:
        file.extractall(folder / "staged", filter="tar")
    config = folder / "staged/env/pyvenv.cfg"
    config.write_text(config.read_text().replace("@STAGED@", str(folder / "staged")))
    return folder / "staged/env/bin/python"


def test_an_editable_install_and_a_path_file_become_real(venv: Path, tmp_path: Path) -> None:
    source = tmp_path / "tree"
    for name in ("mine", "beside"):
        (source / name).mkdir(parents=True)
        (source / name / "__init__.py").write_text(f"WHO = '{name}'\n")
    (source / "single.py").write_text("WHO = 'single'\n")
    (tmp_path / "flat/flatly").mkdir(parents=True)
    (tmp_path / "flat/flatly/__init__.py").write_text("WHO = 'flatly'\n")
    (tmp_path / "flat/data").mkdir()
    (tmp_path / "flat/data/large.bin").write_bytes(bytes(1000))
    mapping = {"mine": f"{source}/mine", "mine.inner": f"{source}/beside", "single": f"{source}/single"}
    (packages(venv) / "__editable___mine_1_finder.py").write_text(f"MAPPING: dict[str, str] = {mapping!r}\n")
    (packages(venv) / "__editable__.mine-1.pth").write_text("import __editable___mine_1_finder; x.install()\n")
    (packages(venv) / "__editable__.flat-1.pth").write_text(f"{tmp_path}/flat\n")
    python = unpack(interpreter(venv), tmp_path)
    for folder in (source, tmp_path / "flat", venv):
        folder.rename(folder.with_name(f"{folder.name}-gone"))
    code = "import mine, mine.inner, single, flatly, json; print(mine.WHO, mine.inner.WHO, single.WHO, flatly.WHO)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["mine", "beside", "single", "flatly"], done.stderr
    assert not list((tmp_path / "staged").rglob("large.bin"))


def test_links_that_lead_out_are_replaced_and_those_inside_are_kept(venv: Path, tmp_path: Path) -> None:
    (tmp_path / "view").mkdir()
    (tmp_path / "view/linked.py").write_text("WHO = 'linked'\n")
    (packages(venv) / "linked.py").symlink_to(tmp_path / "view/linked.py")
    (packages(venv) / "inside.py").symlink_to("linked.py")
    (packages(venv) / "round").mkdir()
    (packages(venv) / "round/again").symlink_to(packages(venv))
    layout = lay_out(interpreter(venv))
    prefix = f"env/lib/{RELEASE}/site-packages"
    assert layout.files[f"{prefix}/linked.py"] == tmp_path / "view/linked.py"
    assert layout.links[f"{prefix}/inside.py"] == "linked.py"
    assert len(layout.files) < 20000


def test_a_change_of_any_file_is_another_environment_and_no_change_is_the_same_file(venv: Path, tmp_path: Path) -> None:
    (packages(venv) / "one.py").write_text("x = 1\n")
    first = pack(lay_out(interpreter(venv)), tmp_path / "cache")
    before = first.stat().st_ino
    assert pack(lay_out(interpreter(venv)), tmp_path / "cache") == first
    assert first.stat().st_ino == before
    (packages(venv) / "one.py").write_text("x = 2\n")
    os.utime(packages(venv) / "one.py", (1, 1))
    assert lay_out(interpreter(venv)).fingerprint() not in first.name


def test_the_system_python_is_refused() -> None:
    system = Interpreter(Path("/usr"), Path("/usr"), Path("/usr/bin/python3"), RELEASE, ())
    with pytest.raises(LaunchError, match="nothing to bring there"):
        lay_out(system)


def test_a_stage_folder_on_a_shared_file_system_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hpc_train.launch.stage_env.is_shared", lambda path: True)
    monkeypatch.setattr("hpc_train.launch.stage_env.file_system_of", lambda path: "lustre")
    with pytest.raises(LaunchError, match="is on lustre, which all nodes share"):
        stage_environment(["n1"], {}, cache=tmp_path, stage_dir="/scratch", say=print)


def test_settings_without_effect_are_refused() -> None:
    srun, mpirun = SrunLauncher(1, "pmix", False, 60), MpirunLauncher("mpirun", ())
    for settings, launcher, words in (
        ({"stage_dir": "/local"}, srun, "has no effect without launch.stage_env"),
        ({"stage_env": True, "rank_python": "/x"}, srun, "both say which Python"),
        ({"stage_env": True}, mpirun, "has no effect here"),
    ):
        with pytest.raises(ConfigError, match=words):
            stage_for_ranks(LaunchConfig.model_validate(settings), launcher, ["n1"], {}, print)
    assert stage_for_ranks(LaunchConfig(), srun, ["n1"], {}, print) is None


def test_the_variables_of_ranks_lead_to_the_staged_folders() -> None:
    moved = {"/apps/venv": "/local/env-1/env", "/apps": "/local/env-1/base", "/src": "/local/env-1/extra/0"}
    staged = Staged("/local/env-1/env/bin/python", moved, has_base=True)
    env = {
        "PATH": "/apps/venv/bin:/usr/bin:/apps/bin",
        "PYTHONPATH": "/src:/other",
        "MPI4PY_LIBMPI": "/apps/venv/lib/libmpi.so.40",
        "HOME": "/apps/venv",
    }
    assert staged.rank_env(env) == {
        "PATH": "/local/env-1/env/bin:/usr/bin:/local/env-1/base/bin",
        "PYTHONPATH": "/local/env-1/extra/0:/other",
        "MPI4PY_LIBMPI": "/local/env-1/env/lib/libmpi.so.40",
        "HOME": "/apps/venv",
        "LD_LIBRARY_PATH": "/local/env-1/base/lib",
    }

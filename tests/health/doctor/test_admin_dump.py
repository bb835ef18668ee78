"""`doctor --admin-dump` on a simulated InfiniBand fabric, with the real ibnetdiscover."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hpc_train.cluster.fabric_find import find_fabric
from hpc_train.cluster.fabric_read import read_fabric
from hpc_train.errors import ConfigError
from hpc_train.health.doctor.admin_dump import admin_dump, slurm_nodes
from tests.launch.fakes import FakeCommands
from tests.services.ib_fabric import missing_programs, node_name, simulated, three_tiers

ROOT = Path(__file__).parents[3]
needs_ibsim = pytest.mark.skipif(
    bool(missing_programs()), reason=f"no {', '.join(missing_programs())} (env/setup_system.sh)"
)


@pytest.fixture
def fakes(tmp_path: Path) -> FakeCommands:
    """A Slurm of eight nodes, two of which have fewer GPUs."""
    nodes = [node_name(pod, group, node) for pod in (0, 1) for group in (0, 1) for node in (0, 1)]
    gres = ["gpu:h100:8(S:0-1)"] * 6 + ["gpu:h100:4"] * 2
    lines = [f"NodeName={name} Arch=x86_64 Gres={text} State=IDLE" for name, text in zip(nodes, gres, strict=True)]
    fakes = FakeCommands(tmp_path / "bin")
    fakes.add("scontrol", "\n".join(lines) + "\n")
    return fakes


@pytest.fixture
def fabric_env(fakes: FakeCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mapping[str, str]]:
    # The library that stands for the kernel makes a folder where the tool is started.
    monkeypatch.chdir(tmp_path)
    net = three_tiers(pods=2, leaves=2, nodes=2, rails=8)
    net.add("Hca", "store1 mlx5_0", 1)
    net.join("store1 mlx5_0", "core0")
    with simulated(net) as env:
        yield {**env, "PATH": f"{fakes.folder}{os.pathsep}{env['PATH']}", "PYTHONPATH": str(ROOT)}


def dump(env: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpc_train", "doctor", "--admin-dump", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@needs_ibsim
def test_the_dump_is_what_everybody_reads_afterwards(fabric_env: Mapping[str, str], tmp_path: Path) -> None:
    path = tmp_path / "fabric.yaml"
    done = dump(fabric_env, str(path))
    assert done.returncode == 0, done.stderr
    assert f"{path}: 8 nodes, 8 rails (mlx5_0, mlx5_1, " in done.stdout
    assert "32 leaves, 2 pods" in done.stdout
    assert f"fabric.source={path}" in done.stdout
    assert path.stat().st_mode & 0o777 == 0o644
    fabric = read_fabric(str(path))
    first, last = node_name(0, 0, 0), node_name(1, 1, 1)
    assert fabric.nodes[first].leaves == tuple(f"pod0 leaf0 rail{rail}" for rail in range(8))
    assert (fabric.nodes[first].num_gpus, fabric.nodes[last].num_gpus) == (8, 4)
    assert fabric.tier(first, 3, last, 3) == "core"
    found = find_fabric(str(path), [first, last], {}, gpus={first: 8, last: 4})
    assert any("InfiniBand tells the rail of each card" in note for note in found.notes)
    assert list(tmp_path.glob(".fabric*")) == []


@needs_ibsim
def test_only_the_named_cards_are_rails(fabric_env: Mapping[str, str], tmp_path: Path) -> None:
    admin_dump(str(tmp_path / "f.yaml"), fabric_env, "mlx5_[6,1]")
    fabric = read_fabric(str(tmp_path / "f.yaml"))
    assert fabric.rail_nics == ("mlx5_6", "mlx5_1")
    assert fabric.nodes[node_name(0, 0, 0)].leaves == ("pod0 leaf0 rail6", "pod0 leaf0 rail1")


@needs_ibsim
def test_a_folder_that_is_not_there_is_told(fabric_env: Mapping[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory.* Give a file in a folder that is there"):
        admin_dump(str(tmp_path / "none/f.yaml"), fabric_env)


def test_without_the_tool_or_the_right_nothing_is_written(fakes: FakeCommands, tmp_path: Path) -> None:
    fakes.add("ibnetdiscover", err="ibwarn: [1] mad_rpc_open_port: can't open UMAD port ((null):0)\n", code=1)
    env = {**os.environ, "PATH": fakes.path, "PYTHONPATH": str(ROOT)}
    done = dump(env, str(tmp_path / "f.yaml"))
    assert done.returncode == 3
    assert "ibnetdiscover fails: ibwarn: [1] mad_rpc_open_port: can't open UMAD port" in done.stderr
    assert not (tmp_path / "f.yaml").exists()


def test_typed_and_several_gres_are_counted(fakes: FakeCommands) -> None:
    """FC-54, as `scontrol show node` prints them."""
    gres = {"a": "gpu:a100:4(S:0-1)", "b": "gpu:turing:1,gpu:ampere:3", "c": "(null)", "d": "gpu:8"}
    fakes.add(
        "scontrol", "".join(f"NodeName={name} CPUAlloc=0 Gres={text} NodeAddr={name}\n" for name, text in gres.items())
    )
    assert slurm_nodes({"PATH": fakes.path}) == {"a": 4, "b": 4, "c": None, "d": 8}
    fakes.add("scontrol", code=1)
    assert slurm_nodes({"PATH": fakes.path}) == {}


def test_cards_without_a_dump_have_no_effect_and_are_refused() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hpc_train", "doctor", "--cards", "mlx5_0"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--cards has no effect without --admin-dump" in done.stderr

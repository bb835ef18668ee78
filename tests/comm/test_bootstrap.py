"""A started process becomes the right rank, or says why it cannot; never a silent world of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cluster.situation import RankHint
from hpc_train.comm.bootstrap import bootstrap
from hpc_train.comm.mpi import check_world, load_mpi
from hpc_train.errors import ExitCode, LaunchError
from tests.ports import unused_ports
from tests.ranks import run_mpi

PROGRAM = Path(__file__).with_name("bootstrap_program.py")
ROOT = Path(__file__).parents[2]


def _run(num_ranks: int, source: str, *what: str):
    result = run_mpi([PROGRAM, source, *what], num_ranks)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return result, lines


def test_a_world_of_one_under_a_launcher_of_four_is_refused_with_both_pairs_and_the_library():
    """FC-09: the PMI mismatch. Each task is alone, so only the launcher's rank 0 is to print."""
    for rank in range(4):
        hint = RankHint(rank, 4, 0, "srun")
        with pytest.raises(LaunchError, match=r"4 tasks.*number \d.*rank 0 of 1.*Open MPI v5.*--mpi=pmix") as caught:
            check_world(0, 1, hint, "Open MPI v5.0.8, package: x")
        assert caught.value.exit_code == ExitCode.LAUNCH
        assert caught.value.reporter == (0 if rank == 0 else -1)


@pytest.mark.parametrize(
    ("library", "cure"),
    [
        ("MPICH Version: 4.2", "--mpi=pmi2"),
        ("Open MPI v4.1.4", "--mpi=pmix, or --mpi=pmi2"),
        ("Cray", "srun --mpi=list"),
    ],
)
def test_the_cure_fits_the_library(library, cure):
    with pytest.raises(LaunchError, match=cure):
        check_world(0, 1, RankHint(0, 2, 0, "srun"), library)


def test_equal_worlds_and_an_unknown_launcher_pass():
    check_world(3, 4, RankHint(3, 4, 1, "srun"), "any")
    check_world(0, 1, None, "any")


def test_an_mpi_library_that_cannot_be_loaded_is_a_launch_error(monkeypatch):
    """FC-92: wheel and module of different MPI versions."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(LaunchError, match=r"MPI cannot be loaded.*MPI4PY_LIBMPI"):
        load_mpi()


def test_importing_the_package_starts_no_mpi():
    """FC-72: a loader worker that imports us must not call MPI_Init."""
    code = (
        "import hpc_train, hpc_train.comm.bootstrap, hpc_train.train.main, sys;assert 'mpi4py.MPI' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_process_that_nothing_started_is_no_rank(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI"))]:
        monkeypatch.delenv(name)
    with pytest.raises(LaunchError, match="no rank of a started job"):
        bootstrap("auto")


@pytest.fixture(scope="module")
def three_ranks() -> dict[str, list[dict[str, Any]]]:
    """What three ranks under mpirun became, each time that they bootstrapped: a start of them takes seconds."""
    what = ("another plan on one rank", "reversed", "plain")
    result, lines = _run(3, "mpi", *what)
    assert result.returncode == ExitCode.LAUNCH, result.stderr
    return {name: [line for line in lines if line["what"] == name] for name in what}


def _check_plain(worlds: list[dict[str, Any]], num_ranks: int) -> None:
    assert sorted(world["rank"] for world in worlds) == list(range(num_ranks))
    for world in worlds:
        assert world["rank"] == world["launcher_rank"] == world["local_rank"]
        assert world["sum"] == sum(range(num_ranks))
        assert world["gathered"] == [{"rank": rank} for rank in range(num_ranks)]
        at_last = ["x" * rank for rank in range(num_ranks)] if world["rank"] == num_ranks - 1 else None
        assert world["gathered_at_last"] == at_last
        assert world["told"] == ["from", num_ranks - 1]


@pytest.mark.mpi
def test_mpi_ranks_become_a_world(three_ranks):
    _check_plain(three_ranks["plain"], 3)


@pytest.mark.mpi
def test_a_rank_that_mpirun_starts_alone_becomes_a_world():
    result, worlds = _run(1, "auto", "plain")
    assert result.returncode == 0, result.stderr
    _check_plain(worlds, 1)


@pytest.mark.mpi
def test_the_plan_gives_the_ranks_and_rank_0_need_not_be_the_launchers_first(three_ranks):
    """FC-17: the store lives where rank 0 is, not on the launcher's first process."""
    worlds = three_ranks["reversed"]
    assert sorted((world["launcher_rank"], world["rank"]) for world in worlds) == [(0, 2), (1, 1), (2, 0)]
    assert all(world["sum"] == 3 for world in worlds)


@pytest.mark.mpi
def test_a_different_plan_on_one_rank_is_refused_on_all(three_ranks):
    """FC-56: the plan's hash is compared once, before any group exists."""
    answers = three_ranks["another plan on one rank"]
    assert len(answers) == 3
    assert all("different plans" in answer["error"] for answer in answers)


@pytest.mark.mpi
@pytest.mark.parametrize(("raised", "code"), [("ValueError('x')", 1), ("hpc_train.errors.DataError('x')", 4)])
def test_an_uncaught_error_on_one_rank_ends_all_in_seconds_with_its_code(raised, code, tmp_path):
    """MPI_Finalize at exit would wait for the ranks that wait in the collective."""
    script = tmp_path / "script.py"
    script.write_text(
        "import hpc_train, hpc_train.errors, torch, torch.distributed as dist\n"
        "world = hpc_train.bootstrap()\n"
        f"if world.rank == 1: raise {raised}\n"
        "dist.all_reduce(torch.ones(1)); world.control.barrier()\n"
    )
    result = run_mpi([script], 2)
    assert result.returncode == code
    assert f"{raised[: raised.index('(')]}: x\n" in result.stderr


@pytest.mark.mpi
def test_ranks_that_ask_for_different_layouts_or_do_not_come_are_told(tmp_path):
    """FC-56, FC-59: on every rank, and within the time limit."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, time\n"
        "from hpc_train import Layout, bootstrap, build_groups\n"
        "from hpc_train.comm.join import Rendezvous\n"
        "second = os.environ['OMPI_COMM_WORLD_RANK'] == '1'\n"
        "told = []\n"
        "try: bootstrap(layout=Layout(pp=2) if second else Layout(tp=2), device='cpu')\n"
        "except Exception as problem: told.append([type(problem).__name__, str(problem)])\n"
        "world = bootstrap(layout=Layout(tp=2), device='cpu', rendezvous=Rendezvous(timeout_s=3))\n"
        "try: bootstrap(layout=Layout(tp=2), device='cpu')\n"
        "except Exception as problem: told.append([type(problem).__name__, str(problem)])\n"
        "tell = lambda: print(json.dumps([world.rank, told]), flush=True)\n"
        "if second: tell(); time.sleep(600)\n"
        "try: build_groups(world)\n"
        "except Exception as problem: told.append([type(problem).__name__, str(problem)])\n"
        "tell()\n"
        "os._exit(0)\n"
    )
    result = run_mpi([script], 2)
    told = dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))
    for rank in (0, 1):
        assert told[rank][0][0] == "LaunchError"
        assert "1 of 2 ranks ask for another layout than rank 0 (Layout(" in told[rank][0][1]
        assert told[rank][1][0] == "LaunchError"
        assert "in a process group already" in told[rank][1][1]
    assert [kind for kind, _ in told[0][2:]] == ["CollectiveError"]
    assert "waited 3 s for the others of 2 ranks" in told[0][2][1]
    assert told[1][2:] == []


def test_an_uncaught_error_of_a_script_is_printed_and_odd_arguments_are_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from hpc_train import Layout, bootstrap\n"
        "for arguments in ({'source': 'torchrun'}, {'device': 'gpu'}, {'layout': {'tp': 1}}, {'source': 'mpi'}):\n"
        "    try: bootstrap(**{'source': 'single', 'device': 'cpu', **arguments})\n"
        "    except Exception as problem: print(type(problem).__name__, problem)\n"
        "bootstrap('single', device='cpu')\n"
        "raise RuntimeError('my own bug')\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI"))}
    env["PYTHONPATH"] = str(ROOT)
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, timeout=60)
    assert result.returncode == ExitCode.INTERNAL
    assert "RuntimeError: my own bug" in result.stderr
    source, device, layout, mpi = result.stdout.splitlines()
    assert source.startswith("ValueError") and "torchrun" in source and "mpi, env, single" in source
    assert device.startswith("ValueError") and "'gpu'" in device
    assert layout.startswith("ValueError") and "Layout(tp=2)" in layout
    assert mpi.startswith("LaunchError") and "no launcher started this process" in mpi


@pytest.mark.mpi
def test_one_process_on_purpose_is_refused_where_several_were_started():
    result, answers = _run(2, "single", "plain")
    assert result.returncode == ExitCode.LAUNCH
    assert all("started 2 tasks" in answer["error"] for answer in answers)


def test_one_process_on_purpose_is_a_world():
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI"))}
    env["PYTHONPATH"] = str(ROOT)
    result = subprocess.run(
        [sys.executable, PROGRAM, "single", "plain"], capture_output=True, text=True, env=env, timeout=60, check=True
    )
    assert json.loads(result.stdout)["world_size"] == 1


def test_torchruns_variables_become_a_world():
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI"))}
    (port,) = unused_ports(1)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, "env", "plain"],
            stdout=subprocess.PIPE,
            text=True,
            env={**env, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)},
        )
        for rank in range(2)
    ]
    worlds = [json.loads(process.communicate(timeout=90)[0]) for process in ranks]
    assert [world["rank"] for world in worlds] == [0, 1]
    assert all(world["sum"] == 1 and world["told"] == ["from", 1] for world in worlds)


def test_a_rank_on_a_node_with_amd_gpus_only_is_refused_unless_it_asked_for_the_cpu(monkeypatch):
    from hpc_train.comm.join import choose_device

    monkeypatch.setattr("hpc_train.cluster.devices.count_amd_gpus", lambda root: 4)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(LaunchError, match="4 AMD GPUs and no NVIDIA ones"):
        choose_device({}, 0, 1, "auto")
    assert choose_device({}, 0, 1, "cpu").type == "cpu"

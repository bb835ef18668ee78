"""A script of one's own: where ranks come from three launchers, they become the planned ones."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hpc_train
from hpc_train.comm.control import Control
from hpc_train.comm.layout import Layout, keep_order, plan_layout
from hpc_train.errors import ConfigError, LaunchError
from tests.ranks import mpi_environment, run_mpi

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/guides/library_example.py"
LINE = re.compile(r"rank (\d+) of (\d+) on (\S+), slot (\d+): pp 0, dp (\d+), cp 0, tp (\d+)")
LOSS = re.compile(r"loss ([\d.]+) -> ([\d.]+)")


class RecordedControl(Control):
    """Rank 0 among ranks that answer as recorded."""

    rank = 0

    def __init__(self, answers: list[Any]) -> None:
        self.size = len(answers)
        self._answers = [answers]

    def all_gather(self, value: Any) -> list[Any]:
        return self._answers.pop() if self._answers else [value] * self.size


def _two_leaves() -> tuple[list[tuple[str, int]], list[Any]]:
    """Four nodes of two slots, in an order in which neighbours are under different leaves."""
    slots = [(node, slot) for node in ("a", "b", "c", "d") for slot in (0, 1)]
    leaf = {"a": "leaf1", "b": "leaf2", "c": "leaf1", "d": "leaf2"}
    return slots, [[f"core.{leaf[node]}.{node}", "switch.switch.node"] for node, _ in slots]


def test_ranks_are_placed_by_the_addresses_that_they_tell() -> None:
    slots, addresses = _two_leaves()
    layout = Layout(tp=2, pp=2, bytes_per_step={"dp": 1000, "pp": 1})
    plan = plan_layout(RecordedControl(addresses), layout, slots, {"PATH": "/nowhere"})
    for group in plan.mesh.groups("tp"):
        assert len({plan.ranks[rank].node for rank in group}) == 1
    leaves = [sorted({plan.ranks[rank].node for rank in group}) for group in plan.mesh.groups("dp")]
    assert sorted(map(tuple, leaves)) == [("a", "c")] * 2 + [("b", "d")] * 2, "the heavy axis stays under one leaf"


def test_an_order_that_leaves_ranks_alone_does_so() -> None:
    slots, addresses = _two_leaves()
    plan = plan_layout(RecordedControl(addresses), Layout(tp=2, order="slurm"), slots, {})
    assert [(planned.node, planned.gpu) for planned in plan.ranks] == slots


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tp=3), "8 ranks do not fill a mesh"),
        (Layout(tp=4), "tp"),
        (Layout(tp=2, order="nearest"), "nearest"),
        (Layout(tp=2, bytes_per_step={"ep": 1}), "bytes_per_step names 'ep', which is no axis; the axes are pp, dp"),
        (Layout(tp=2, bytes_per_step={"dp": -1}), "bytes_per_step has -1 for dp; give a whole number of bytes"),
        (Layout(tp=2, bytes_per_step={"dp": 1e9}), "bytes_per_step has 1000000000.0 for dp; give a whole number"),  # type: ignore[dict-item]
        (Layout(tp=2, bytes_per_step={"dp": "4G"}), "bytes_per_step has '4G' for dp; give a whole number of bytes"),  # type: ignore[dict-item]
        (Layout(tp=2, fabric="/no/such/file.yaml"), "/no/such/file.yaml"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_with_words(layout: Layout, words: str) -> None:
    """FC-57"""
    slots, addresses = _two_leaves()
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan_layout(RecordedControl(addresses), layout, slots, {"PATH": "/nowhere"})


def test_tasks_of_two_steps_on_one_node_are_refused() -> None:
    slots, addresses = _two_leaves()
    slots[1] = ("a", 0)
    with pytest.raises(LaunchError, match="node a have the local ranks 0, 0, not 0 to 1"):
        plan_layout(RecordedControl(addresses), Layout(tp=2), slots, {})


def test_ranks_that_are_numbered_already_stay_so_and_a_split_tp_group_is_said(
    capfd: pytest.CaptureFixture[str],
) -> None:
    slots = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    plan = keep_order(Layout(tp=2), slots, rank=0)
    assert [(planned.node, planned.gpu) for planned in plan.ranks] == slots
    assert "2 of 2 tp groups reach over several nodes, such as ranks 0, 1" in "".join(capfd.readouterr())
    order, fabric = "order='tp,dp,pp,cp'", "fabric='f.yaml'"
    for layout, asked in (
        (Layout(tp=2, order="tp,dp,pp,cp"), order), (Layout(tp=2, fabric="f.yaml"), fabric),
        (Layout(tp=2, order="tp,dp,pp,cp", fabric="f.yaml"), f"{order} and {fabric}"),
    ):  # fmt: skip
        with pytest.raises(LaunchError, match=f"placement by {asked}, but .* RANK numbers .* or leave {asked} out"):
            keep_order(layout, slots, rank=0)


def test_a_process_alone_has_groups_and_a_device_mesh(tmp_path: Path) -> None:
    """FC-57: size 1 is legal everywhere."""
    script = tmp_path / "alone.py"
    script.write_text(
        "from hpc_train import Layout, bootstrap, build_groups\n"
        "world = bootstrap('single', layout=Layout(), device='cpu')\n"
        "groups = build_groups(world)\n"
        "print(groups.device_mesh('pp', 'dp', 'cp', 'tp').shape, groups.handles, groups.along('hdp').group_size)\n"
        "world.close()\n"
    )
    done = subprocess.run([sys.executable, script], env=mpi_environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout == "(1, 1, 1, 1) () 1\n", done.stderr


def test_without_a_layout_groups_ask_for_a_mesh() -> None:
    from tests.worlds import single_world

    with pytest.raises(ValueError, match="of which mesh"):
        hpc_train.build_groups(single_world())
    with pytest.raises(ValueError, match="a plan or a layout"):
        hpc_train.bootstrap("single", plan=keep_order(Layout(), [("a", 0)], 0), layout=Layout())


def test_importing_the_package_imports_neither_torch_nor_numpy() -> None:
    code = "import hpc_train, sys; assert not {'torch', 'numpy', 'mpi4py', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert all(getattr(hpc_train, name) is not None for name in hpc_train.__all__)


def _check(output: str, num_ranks: int) -> dict[int, tuple[str, int]]:
    """The example's lines: every rank once, row-major coordinates, and a model that learned."""
    places = {}
    for rank, size, node, slot, dp, tp in LINE.findall(output):
        assert int(size) == num_ranks
        assert (int(dp), int(tp)) == divmod(int(rank), 2)
        places[int(rank)] = (node, int(slot))
    assert sorted(places) == list(range(num_ranks)), output
    first, last = map(float, LOSS.findall(output)[0])
    assert last < first
    return places


@pytest.mark.mpi
@pytest.mark.long  # over MPI it runs under srun too
@pytest.mark.timeout(300)
def test_the_guides_example_runs_under_mpirun() -> None:
    done = run_mpi(EXAMPLE, 2, timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert _check(done.stdout, 2) == {rank: (socket.gethostname(), rank) for rank in range(2)}


@pytest.mark.timeout(300)
def test_the_guides_example_runs_under_torchruns_variables() -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, done = store.port, []
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # As under torchrun, whose agent holds the store.
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    started = [
        subprocess.Popen(
            [sys.executable, EXAMPLE],
            env=mpi_environment({**variables, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        done = [process.communicate(timeout=280) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * 2, "".join(stderr for _, stderr in done)
    assert _check("".join(stdout for stdout, _ in done), 2) == {rank: (socket.gethostname(), rank) for rank in range(2)}


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_the_guides_example_runs_under_srun_and_tp_stays_in_a_node_whatever_the_distribution(slurm: Any) -> None:
    words = ["srun", "--mpi=pmix", "-N2", "-n4", "--ntasks-per-node=2", "--distribution=cyclic"]
    done = slurm.run(
        [*words, sys.executable, str(EXAMPLE)],
        timeout=280,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    places = _check(done.stdout, 4)
    assert len(set(places.values())) == 4
    for rank in range(0, 4, 2):
        assert places[rank][0] == places[rank + 1][0]

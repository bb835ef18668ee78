"""`exec` on this machine, by mpirun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import processes
from tests.launch import programs
from tests.ranks import mpi_environment

pytestmark = pytest.mark.mpi

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} \S+ r(\d+) \| (.*)$")


def environment(**more: str) -> dict[str, str]:
    """Ours without traces of a launcher and without components of Open MPI, which the command is to choose."""
    chosen = {name: value for name, value in mpi_environment().items() if not name.startswith("OMPI_MCA_")}
    return {**chosen, "PYTHONPATH": str(ROOT), **more}


def exec_ranks(folder: Path, ranks: int, *program: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpc_train", "exec", "-n", str(ranks), "--run-dir", str(folder / "run")]
    return subprocess.run(
        [*command, "--", *program],
        cwd=folder,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def lines_by_rank(output: str) -> dict[int, list[str]]:
    """The prefixed lines of an output; any other line fails the test."""
    lines: dict[int, list[str]] = {}
    for line in output.splitlines():
        match = LINE.match(line)
        assert match, line
        lines.setdefault(int(match[1]), []).append(match[2])
    return lines


def test_a_plain_torch_program_meets_over_the_store_that_the_command_holds(tmp_path: Path) -> None:
    done = exec_ranks(tmp_path, 2, sys.executable, "-c", programs.TORCH)
    assert done.returncode == 0, done.stderr
    assert {line for lines in lines_by_rank(done.stdout).values() for line in lines} == {
        "sum 3 size 2 local 0", "sum 3 size 2 local 1",
    }  # fmt: skip


def test_a_program_that_uses_mpi4py_itself_works(tmp_path: Path) -> None:
    done = exec_ranks(tmp_path, 3, sys.executable, "-c", programs.MPI)
    assert done.returncode == 0, done.stderr
    assert lines_by_rank(done.stdout) == {rank: ["mpi is up", "mpi 3 of 3"] for rank in range(3)}


def test_a_program_that_uses_the_library_meets_over_the_store_or_over_mpi_if_it_asks_for_that(tmp_path: Path) -> None:
    """The port of MASTER_PORT is taken: the command holds the store there."""
    done = exec_ranks(tmp_path, 2, sys.executable, "-c", programs.LIBRARY)
    assert done.returncode == 0, done.stderr
    met = ["auto is env with 2 ranks", "mpi is mpi with 2 ranks"]
    assert lines_by_rank(done.stdout) == {rank: met for rank in range(2)}


def test_every_rank_gets_its_variables_and_none_of_the_command_s_own(tmp_path: Path) -> None:
    done = exec_ranks(tmp_path, 2, sys.executable, "-c", programs.VARIABLES)
    assert done.returncode == 0, done.stderr
    found = {rank: json.loads(lines[0]) for rank, lines in lines_by_rank(done.stdout).items()}
    for rank, variables in found.items():
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(rank)
        assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert (variables["NODE_RANK"], variables["GROUP_RANK"]) == ("0", "0")
        assert variables["HPC_TRAIN_RENDEZVOUS_TOKEN"] is None
    assert found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"] != "0"
    table = (tmp_path / "run" / "ranks.tsv").read_text().splitlines()
    assert len(table) == 3


def test_a_preset_address_is_respected(tmp_path: Path) -> None:
    preset = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29123"}
    done = exec_ranks(tmp_path, 1, sys.executable, "-c", programs.VARIABLES, **preset)
    assert done.returncode == 0, done.stderr
    variables = json.loads(lines_by_rank(done.stdout)[0][0])
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("127.0.0.1", "29123")


def test_one_rank_that_fails_ends_all_in_seconds_with_its_code_and_its_error(tmp_path: Path) -> None:
    done = exec_ranks(tmp_path, 2, sys.executable, "-c", programs.ONE_FAILS)  # the other would sleep for ten minutes
    assert done.returncode == 7
    assert "first failure: rank 1 on" in done.stderr
    assert "ended with exit code 7" in done.stderr
    record = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (record["rank"], record["exit_code"]) == (1, 7)


def test_a_program_that_a_signal_ends_gives_the_shell_s_code(tmp_path: Path) -> None:
    done = exec_ranks(tmp_path, 1, "bash", "-c", "kill -SEGV $$")
    assert done.returncode == 128 + signal.SIGSEGV
    assert "SIGSEGV" in done.stderr


def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = exec_ranks(tmp_path, 1, "no-such-program")
    assert done.returncode == 3
    assert "no-such-program cannot be started" in done.stderr


def test_lines_of_many_writers_arrive_whole(tmp_path: Path) -> None:
    """FC-99"""
    program = (
        "import sys\nfor n in range(100): sys.stderr.write(f'{n} ' + 'x' * 200 + '\\n')\nprint('no line end', end='')"
    )
    done = exec_ranks(tmp_path, 3, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    for lines in lines_by_rank(done.stdout).values():
        assert sorted(lines) == sorted([f"{number} " + "x" * 200 for number in range(100)] + ["no line end"])


def sleeping_ranks(folder: Path) -> subprocess.Popen[str]:
    """The command, with two ranks that are up and sleep."""
    command = [sys.executable, "-m", "hpc_train", "exec", "-n", "2", "--run-dir", str(folder / "run")]
    driver = subprocess.Popen(
        [*command, "--", "bash", "-c", "echo up; sleep 600"],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert driver.stdout is not None
    for _ in range(2):
        assert "up" in driver.stdout.readline()
    return driver


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_everything_within_seconds(tmp_path: Path, number: signal.Signals) -> None:
    driver = sleeping_ranks(tmp_path)
    below = processes.descendants(driver.pid)
    assert len(below) >= 5
    driver.send_signal(number)
    driver.communicate(timeout=100)  # the ranks would sleep for ten minutes
    assert driver.returncode == 1
    assert not [pid for pid in below if os.path.exists(f"/proc/{pid}") and processes.command_line(pid)]
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert outcome["outcome"] == "stopped"
    assert number.name in outcome["reason"]


def test_when_the_driver_is_killed_outright_nothing_is_left(tmp_path: Path) -> None:
    driver = sleeping_ranks(tmp_path)
    below = processes.descendants(driver.pid)
    driver.kill()
    driver.communicate(timeout=100)
    deadline = time.monotonic() + 60
    while left := [pid for pid in below if processes.command_line(pid)]:
        assert time.monotonic() < deadline, [processes.command_line(pid) for pid in left]
        time.sleep(0.1)

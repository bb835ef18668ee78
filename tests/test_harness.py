"""The harness keeps its promises: errors come from the right rank, nothing hangs, nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.node_agents import wait_for, wait_until
from tests.ranks import RankFailed, TestRank, run_mpi, run_ranks, run_tree


def _sum_of_ranks(me: TestRank, scale: int) -> dict[str, Any]:
    import torch
    import torch.distributed

    total = torch.tensor([float(me.rank * scale)])
    torch.distributed.all_reduce(total)
    return {
        "rank": me.rank,
        "total": total.item(),
        "threads": torch.get_num_threads(),
        "env": os.environ.get("X"),
    }


def _rank_two_fails(me: TestRank) -> None:
    if me.rank == 2:
        raise LookupError("what rank 2 looked for")
    time.sleep(100)


class _Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.lock = open(os.devnull)  # noqa: SIM115 - a file does not pickle


def _fail_unpicklably(me: TestRank) -> None:
    raise _Unpicklable("the odd one", "and more")


def _wait_in_named_function(me: TestRank, path: str) -> None:
    if me.rank == 1:
        Path(path).touch()
        time.sleep(100)


def _die(me: TestRank) -> None:
    if me.rank == 1:
        os._exit(7)
    time.sleep(100)


def _start_child_and_hang(me: TestRank, path: str) -> None:
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(path).with_suffix(".new").write_text(str(child.pid))
    Path(path).with_suffix(".new").rename(path)
    time.sleep(100)


def _end_time_of_ranks_when(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Have their time run out when one rank alone has not ended and this file is there, whatever the clock says."""
    real = ranks.wait_for_pipes

    def wait(pipes: Sequence[Any], timeout: float) -> list[Any]:
        if len(pipes) > 1:
            return real(pipes, timeout)
        wait_for(path)
        return []

    monkeypatch.setattr(ranks, "wait_for_pipes", wait)


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_reduce_over_gloo_and_their_results_come_in_rank_order(world_size: int) -> None:
    results = run_ranks(_sum_of_ranks, world_size, 10, env={"X": "seen"})
    total = 10.0 * sum(range(world_size))
    assert results == [{"rank": rank, "total": total, "threads": 1, "env": "seen"} for rank in range(world_size)]


def test_the_error_of_a_rank_is_raised_with_its_traceback_and_the_others_end_in_seconds() -> None:
    start = time.monotonic()
    with pytest.raises(LookupError, match="what rank 2 looked for") as caught:
        run_ranks(_rank_two_fails, 3)
    assert time.monotonic() - start < 90
    note = "".join(caught.value.__notes__)
    assert "on rank 2 of 3" in note
    assert "in _rank_two_fails" in note


def test_an_error_that_does_not_pickle_still_shows_its_traceback() -> None:
    with pytest.raises(RankFailed, match="the odd one"):
        run_ranks(_fail_unpicklably, 1, backend=None)


def test_ranks_that_do_not_end_in_time_are_shown_with_their_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _end_time_of_ranks_when(monkeypatch, tmp_path / "waits")
    with pytest.raises(RankFailed) as caught:
        run_ranks(_wait_in_named_function, 2, str(tmp_path / "waits"), backend=None)
    message = str(caught.value)
    assert "ranks [1] of 2 did not end within 180 s" in message
    assert "in _wait_in_named_function" in message


def test_a_rank_that_dies_is_noticed_at_once_with_its_exit_code() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 ended without a result, exit code 7"):
        run_ranks(_die, 2)
    assert time.monotonic() - start < 90


def test_what_a_rank_started_is_killed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    _end_time_of_ranks_when(monkeypatch, pid_file)
    with pytest.raises(RankFailed, match="did not end within"):
        run_ranks(_start_child_and_hang, 1, str(pid_file), backend=None)
    assert not _alive(int(pid_file.read_text()))


@pytest.mark.mpi
def test_run_mpi_starts_ranks_of_one_world(tmp_path: Path) -> None:
    script = tmp_path / "size.py"
    script.write_text("from mpi4py import MPI\nprint('rank', MPI.COMM_WORLD.rank, 'of', MPI.COMM_WORLD.size)\n")
    done = run_mpi(script, 3)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 3" for rank in range(3)]


@pytest.mark.mpi
def test_run_mpi_kills_the_whole_run_when_it_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LateWhenBothAreUp(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            wait_until(lambda: len(list(tmp_path.glob("pid.*"))) == 2)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(ranks.subprocess, "Popen", LateWhenBothAreUp)
    script = tmp_path / "hang.py"
    script.write_text(
        f"import os, time\nopen({str(tmp_path)!r} + f'/pid.{{os.getpid()}}', 'w').close()\n"
        "print('still here', flush=True)\ntime.sleep(100)\n"
    )
    with pytest.raises(RankFailed, match="killed after 180 s"):
        run_mpi(script, 2)
    pids = [int(path.suffix[1:]) for path in tmp_path.glob("pid.*")]
    assert len(pids) == 2
    assert not any(_alive(pid) for pid in pids)


def test_run_tree_gives_output_and_exit_code() -> None:
    done = run_tree(["sh", "-c", "echo out; echo err >&2; exit 3"], env=dict(os.environ), timeout_s=10)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


# The rest runs pytest in a process of its own, with this conftest.

_ROOT = Path(__file__).resolve().parent.parent


def _run_pytest(tmp_path: Path, test: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import *\n"
        "SERVICES['hdfs'] = lambda: 'none on the moon'\n"
        "SERVICES['modules'] = lambda: None\n"
    )
    (tmp_path / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(_ROOT / "pyproject.toml")]
    command += ["--rootdir", str(tmp_path), str(tmp_path / "test_it.py"), *options]
    ours = ("HPC_TRAIN_REQUIRE", "PYTEST_XDIST_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return run_tree(command, env={**clean, "PYTHONPATH": str(_ROOT), **env}, timeout_s=60, cwd=tmp_path)


_NEEDS_HDFS = "import pytest\n@pytest.mark.hdfs\ndef test_it():\n    pass\n"


def test_a_test_whose_service_is_missing_is_skipped_with_the_reason_and_counted(tmp_path: Path) -> None:
    done = _run_pytest(tmp_path, _NEEDS_HDFS)
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
    assert "    1  hdfs: none on the moon" in done.stdout


def test_a_required_service_that_is_missing_fails_the_test(tmp_path: Path) -> None:
    done = _run_pytest(tmp_path, _NEEDS_HDFS, HPC_TRAIN_REQUIRE="mpi, hdfs")
    assert done.returncode == 1, done.stdout
    assert "hdfs is required by HPC_TRAIN_REQUIRE: none on the moon" in done.stdout


def test_a_test_of_a_required_service_may_not_skip_by_itself_either(tmp_path: Path) -> None:
    test = "import pytest\n@pytest.mark.modules\ndef test_it():\n    pytest.skip('not today')\n"
    assert _run_pytest(tmp_path, test).returncode == 0
    done = _run_pytest(tmp_path, test, HPC_TRAIN_REQUIRE="modules")
    assert done.returncode == 1, done.stdout
    assert "skipped although HPC_TRAIN_REQUIRE has modules: not today" in done.stdout


def test_an_unknown_required_service_is_refused(tmp_path: Path) -> None:
    done = _run_pytest(tmp_path, _NEEDS_HDFS, HPC_TRAIN_REQUIRE="slrum")
    assert done.returncode == 4, done.stdout
    assert "HPC_TRAIN_REQUIRE names ['slrum']" in done.stderr


def test_the_summary_has_minutes_by_kind(tmp_path: Path) -> None:
    test = "import pytest\n@pytest.mark.modules\ndef test_it():\n    pass\ndef test_that():\n    pass\n"
    lines = _run_pytest(tmp_path, test).stdout.splitlines()
    assert any(line.endswith("1 tests  modules") for line in lines)
    assert any(line.endswith("1 tests  pure") for line in lines)


_LEAKS = """
import os, subprocess
def test_leaks():
    # A grandchild in a session of its own, whose parent ends at once.
    subprocess.run(["sh", "-c", "setsid sleep 987 & echo $! > pid"], check=True)
def test_after():
    pass
"""


def test_a_process_left_behind_is_killed_and_fails_the_session(tmp_path: Path) -> None:
    done = _run_pytest(tmp_path, _LEAKS)
    assert done.returncode == 1, done.stdout
    assert "2 passed" in done.stdout
    assert "sleep 987 (first seen after test_it.py::test_leaks)" in done.stdout
    assert not _alive(int((tmp_path / "pid").read_text()))


def test_workers_bring_their_part_of_the_summary_and_what_they_left_behind(tmp_path: Path) -> None:
    test = _LEAKS + "def test_skipped():\n    import pytest\n    pytest.skip('not today')\n"
    done = _run_pytest(tmp_path, test, "-n", "2")
    assert done.returncode == 1, done.stdout
    assert "2 passed, 1 skipped" in done.stdout
    assert "sleep 987 (first seen after test_it.py::test_leaks)" in done.stdout
    assert any(line.endswith("3 tests  pure") for line in done.stdout.splitlines())
    assert "    1  not today" in done.stdout


def test_when_the_session_is_terminated_fixtures_and_processes_end(tmp_path: Path) -> None:
    test = """
import os, pathlib, signal, subprocess, time, pytest
@pytest.fixture(scope="session")
def server():
    yield
    pathlib.Path("torn down").touch()
def test_it(server):
    child = subprocess.Popen(["sleep", "987"])
    pathlib.Path("pid").write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(100)
"""
    done = _run_pytest(tmp_path, test)
    assert done.returncode == 2, done.stdout
    assert (tmp_path / "torn down").exists()
    assert not _alive(int((tmp_path / "pid").read_text()))

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.cluster import stack_dump
from hpc_train.cluster.stack_dump import STACK_SIGNAL, Frame, ThreadStack
from hpc_train.health.stack_report import group_by_stack, rank_list, report
from hpc_train.health.stacks import RankStacks, collect, from_lines, to_lines
from tests import processes
from tests.node_agents import wait_until

RANK = """\
import sys, time, threading
from pathlib import Path
from hpc_train.cluster.stack_dump import answer_stack_requests
answer_stack_requests(Path(sys.argv[1]), int(sys.argv[2]), "n1")
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def waits():
    print("ready", flush=True)
    time.sleep(60)
waits()
"""


class Ranks:
    """Processes that are ranks as far as stacks go."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, rank: int, code: str = RANK) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "-c", code, str(self.run_dir), str(rank)]
        process = self.processes[rank] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.end()


def test_each_rank_tells_where_it_is_and_goes_on(ranks: Ranks) -> None:
    for rank in (0, 1):
        ranks.start(rank)
    for _ in range(2):
        found = collect(ranks.run_dir, "n1", None)
        assert [(stacks.rank, stacks.source, stacks.problem) for stacks in found] == [(0, "rank", None)] + [
            (1, "rank", None)
        ]
        assert [frame.function for frame in found[0].threads[0].frames] == ["waits", "<module>"]
        assert [thread.is_main for thread in found[0].threads] == [True, False]
    assert len(group_by_stack(found)) == 1
    assert all(process.poll() is None for process in ranks.processes.values())
    assert collect(ranks.run_dir / "other", "n1", None) == []
    assert collect(ranks.run_dir, "n2", None) == []


def test_a_stopped_rank_gets_no_signal_and_is_named_with_its_state_and_its_stack_from_outside(ranks: Ranks) -> None:
    ranks.start(0)
    pid = ranks.processes[0].pid
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: stack_dump.process_state(pid) == "T")
    (stacks,) = collect(ranks.run_dir, "n1", None)
    assert stacks.problem is not None
    assert stacks.problem.startswith("it is stopped, as by SIGSTOP")
    assert stacks.source == "py-spy", stacks.problem
    assert [frame.function for frame in stacks.threads[0].frames] == ["waits", "<module>"]
    assert int(stack_dump.status_field(pid, "ShdPnd") or "x", 16) >> (STACK_SIGNAL - 1) & 1 == 0


def test_a_rank_that_runs_but_does_not_answer_is_named_after_the_time_limit(ranks: Ranks) -> None:
    """A library may block all signals in the threads that it finds."""
    alone = RANK.replace("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n", "")
    code = alone.replace("def waits", "import signal; signal.pthread_sigmask(0, range(1, 65))\ndef waits")
    pid = ranks.start(5, code).pid
    wait_until(lambda: stack_dump.process_state(pid) == "S")
    (stacks,) = collect(ranks.run_dir, "n1", None, timeout_s=0.3)
    assert stacks.rank == 5
    assert stacks.problem is not None
    assert "it did not answer in 0.3 s: it sleeps" in stacks.problem


def test_a_process_without_the_handler_is_never_signalled(ranks: Ranks) -> None:
    """The default of a real-time signal is to kill."""
    code = RANK.replace("def waits", f"import faulthandler; faulthandler.unregister({int(STACK_SIGNAL)})\ndef waits")
    process = ranks.start(0, code)
    (stacks,) = collect(ranks.run_dir, "n1", None)
    assert stacks.problem is not None
    assert "no handler" in stacks.problem
    assert process.poll() is None


def test_a_child_of_a_rank_that_inherits_its_file_is_no_rank(ranks: Ranks) -> None:
    code = "import os\n" + RANK.replace("def waits", "child = os.fork()\nif not child: time.sleep(60)\ndef waits")
    process = ranks.start(0, code)
    children = processes.descendants(process.pid)
    assert len(children) == 1
    assert [stacks.pid for stacks in collect(ranks.run_dir, "n1", None)] == [process.pid]
    os.kill(children[0], signal.SIGKILL)


def test_a_program_of_exec_which_prepares_nothing_is_looked_at_from_outside(tmp_path: Path) -> None:
    inner = "import time\ndef waits():\n    print('ready', flush=True)\n    time.sleep(60)\nwaits()"
    program = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {inner!r}])"
    env = {**os.environ, "RANK": "4", "HPC_TRAIN_RUN_DIR": str(tmp_path), "SLURMD_NODENAME": "n1"}
    process = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        found: list[RankStacks] = []

        def waits_for_its_own() -> bool:
            found[:] = collect(tmp_path, "n1", None)
            return "_try_wait" in [frame.function for frame in found[0].threads[0].frames]

        wait_until(waits_for_its_own)
        (stacks,) = found
        assert (stacks.rank, stacks.pid, stacks.problem, stacks.source) == (4, process.pid, None, "py-spy")
        assert collect(tmp_path, "n2", None) == []
    finally:
        processes.kill_tree(process.pid)
        process.communicate()


def test_a_rank_of_the_plan_without_a_process_is_named(tmp_path: Path) -> None:
    (tmp_path / "ranks.tsv").write_text("rank\thost\n0\tn1\n1\tn2\n")
    (stacks,) = collect(tmp_path, "n1", None)
    assert (stacks.rank, stacks.pid, stacks.problem) == (0, None, "there is no process of it on this node")


WAITS = (Frame("/x/hpc_train/comm/collectives.py", 50, "all_reduce_sum"), Frame("/x/hpc_train/cli.py", 9, "main"))
WORKS = (Frame("/x/hpc_train/train/step.py", 60, "step"), Frame("/x/hpc_train/cli.py", 9, "main"))


def stacks_of(rank: int, frames: tuple[Frame, ...], problem: str | None = None) -> RankStacks:
    threads = (ThreadStack(True, frames), ThreadStack(False, (Frame("/x/loader.py", rank, "fetch"),)))
    return RankStacks(rank, "n1", 100 + rank, problem, "rank", threads)


def test_equal_stacks_stand_together_the_most_first_and_the_odd_one_is_marked() -> None:
    found = [stacks_of(rank, WORKS if rank == 2 else WAITS) for rank in range(4)]
    found.append(RankStacks(4, "n2", None, "there is no process of it on this node", None, ()))
    assert report(found, ["n9"], num_frames=1).splitlines() == [
        "node n9 did not answer, nor any rank on it",
        "rank 4 on n2 does not answer: there is no process of it on this node",
        "3 ranks: 0-1, 3",
        "    all_reduce_sum  hpc_train/comm/collectives.py:50",
        "    ... called from 1 more",
        "1 rank: 2 <- differs from the others",
        "    step  hpc_train/train/step.py:60",
        "    ... called from 1 more",
    ]


def test_of_two_halves_neither_is_odd() -> None:
    assert [group.odd for group in group_by_stack([stacks_of(0, WAITS), stacks_of(1, WORKS)])] == [False, False]


def test_ranks_are_listed_short() -> None:
    assert rank_list([7, 0, 1, 2, None]) == "0-2, 7, ?"


def test_lines_of_several_nodes_may_be_mixed_and_a_node_whose_lines_are_cut_off_is_left_out() -> None:
    deep = tuple(Frame(f"/x/{number * 7919}.py", number, f"f{number * 104729}") for number in range(300))
    first, second = to_lines("n1", [stacks_of(0, deep)]), to_lines("n2", [stacks_of(1, deep)])
    assert len(first) > 2
    assert max(map(len, first)) < 600
    mixed = [line for pair in zip(first, second[:-1], strict=False) for line in pair] + first[len(second) - 1 :]
    assert from_lines(["srun: a remark", *mixed]) == {"n1": [stacks_of(0, deep)]}


def test_the_command_refuses_a_run_that_is_not_running(tmp_path: Path) -> None:
    (tmp_path / "attempts.jsonl").touch()
    done = subprocess.run(
        [sys.executable, "-m", "hpc_train", "stacks", str(tmp_path)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert "is not running" in done.stderr
    assert socket.gethostname() not in done.stderr

"""What the kernel tells of a process that ended, to one that is not its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.cluster.process_end import describe_status, memory_kills, more_memory_kills, wait_status

ABORT = "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()"


def kernel() -> tuple[int, int]:
    major, minor = os.uname().release.partition("-")[0].split(".")[:2]
    return int(major), int(minor)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9 (SIGKILL)"),
        (ABORT, "killed by signal 6 (SIGABRT)"),
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("pass", "ended with exit code 0"),
    ],
)
def test_the_status_of_a_process_is_told_until_its_parent_has_taken_it(code: str, words: str) -> None:
    """And by new kernels afterwards."""
    child = subprocess.Popen([sys.executable, "-S", "-c", code])
    pidfd = os.pidfd_open(child.pid)
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        status = wait_status(pidfd, child.pid)
        assert status is not None and describe_status(status) == words
        child.wait()
        assert wait_status(pidfd, child.pid) == (status if kernel() >= (6, 15) else None)
    finally:
        os.close(pidfd)


def test_a_process_that_runs_has_no_status() -> None:
    pidfd = os.pidfd_open(os.getpid())
    assert wait_status(pidfd, os.getpid()) is None
    os.close(pidfd)


def test_a_real_time_signal_has_a_number_only() -> None:
    assert describe_status(signal.SIGRTMIN + 1) == f"killed by signal {signal.SIGRTMIN + 1}"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_kills_for_want_of_memory_are_counted_in_the_process_s_own_cgroup_or_what_is_left_above_it(
    tmp_path: Path,
) -> None:
    """cgroup v2; Slurm removes the folder of a task that has ended."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "7/cgroup", "0::/slurm/job_7/step_0/task_1\n")
    write(proc / "self/mountinfo", f"30 23 0:26 / {root} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n")
    events = "low 0\noom 3\noom_kill {}\noom_group_kill 9\n"
    for folder in ("slurm/job_7/step_0/task_1", "slurm/job_7/step_0", "slurm/job_7"):
        write(root / folder / "memory.events", events.format(2))
    before = memory_kills(7, proc)
    assert more_memory_kills(before) == 0
    write(root / "slurm/job_7/step_0/task_1/memory.events", events.format(3))
    assert more_memory_kills(before) == 1
    (root / "slurm/job_7/step_0/task_1/memory.events").unlink()
    write(root / "slurm/job_7/step_0/memory.events", events.format(4))
    assert more_memory_kills(before) == 2


def test_cgroup_v1_counts_each_cgroup_by_itself(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "7/cgroup", "9:cpu,cpuacct:/slurm\n4:memory:/slurm/uid_1/job_7/step_0\n0::/\n")
    mounts = f"35 31 0:32 / {root}/memory rw - cgroup cgroup rw,memory\n"
    mounts += f"41 31 0:38 / {root}/unified rw - cgroup2 cgroup2 rw\n"
    write(proc / "self/mountinfo", mounts)
    control = root / "memory/slurm/uid_1/job_7/step_0/memory.oom_control"
    write(control, "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    write(root / "memory/slurm/uid_1/job_7/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    before = memory_kills(7, proc)
    write(control, "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert more_memory_kills(before) == 1
    control.unlink()
    assert more_memory_kills(before) is None


def test_where_no_cgroup_can_be_read_nothing_is_said_of_memory(tmp_path: Path) -> None:
    assert memory_kills(7, tmp_path) == {}
    assert more_memory_kills({}) is None

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_train.cluster.process import ProcessFacts, own_process, read_process


def fake_proc(root: Path, processes: dict[int, tuple[int, str, int]], cgroup: str = "0::/\n") -> str:
    """Write a /proc of pid -> (parent, command line with spaces, terminal number)."""
    for pid, (parent, command, terminal) in processes.items():
        folder = root / str(pid)
        folder.mkdir()
        # A name with brackets and spaces, as a process may give itself.
        (folder / "stat").write_text(f"{pid} (od) d (x) S {parent} {pid} {pid} {terminal} -1 0")
        (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
        (folder / "cgroup").write_text(cgroup)
    return str(root)


def test_the_slurmstepd_above_names_the_step(tmp_path: Path) -> None:
    proc = fake_proc(
        tmp_path,
        {1: (0, "init", 0), 5: (1, "slurmstepd: [7.0]   ", 0), 6: (5, "bash run.sh", 0), 9: (6, "python x", 0)},
    )
    assert read_process(9, proc) == ProcessFacts("7.0", False)


def test_the_nearest_slurmstepd_counts(tmp_path: Path) -> None:
    proc = fake_proc(
        tmp_path, {4: (1, "slurmstepd: [6.0]", 0), 5: (4, "slurmstepd: [7.batch]", 0), 9: (5, "bash x", 0)}
    )
    assert read_process(9, proc).held_by == "7.batch"


@pytest.mark.parametrize(
    ("command", "terminal", "is_shell"),
    [
        ("/usr/bin/bash", 34817, True),
        ("-zsh", 34817, True),
        ("bash --login -i", 34817, True),
        ("bash", 0, False),
        ("bash train.sh", 34817, False),
        ("bash -c python", 34817, False),
        ("python train.py", 34817, False),
    ],
)
def test_a_shell_with_a_terminal_is_told_from_a_task(
    tmp_path: Path, command: str, terminal: int, is_shell: bool
) -> None:
    proc = fake_proc(
        tmp_path,
        {5: (1, "slurmstepd: [7.0]", 0), 6: (5, command, terminal), 9: (6, "python run.py", terminal)},
    )
    assert read_process(9, proc) == ProcessFacts("7.0", is_shell)


def test_without_a_slurmstepd_in_sight_the_cgroup_tells(tmp_path: Path) -> None:
    line = "0::/system.slice/slurmstepd.scope/job_7/step_batch/user/task_0\n"
    assert read_process(9, fake_proc(tmp_path, {9: (1, "python", 0)}, line)).held_by == "7.batch"


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert read_process(9, str(tmp_path)) == ProcessFacts()
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "stat").write_text("")
    assert read_process(9, str(tmp_path)) == ProcessFacts()


def test_the_own_process_can_be_asked() -> None:
    assert own_process() == read_process(os.getpid())

"""Lines of srun and of mpirun as they were seen, among those of ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from hpc_train.launch import ranks
from hpc_train.launch.launcher_words import BadEnd, LauncherWords
from hpc_train.launch.ranks import MpirunLauncher, SrunLauncher, ends_silently


def heard(lines: Sequence[str], seconds: Sequence[float] = ()) -> LauncherWords:
    """After these lines, the bad ends among which came at these times."""
    times = iter(seconds)
    words = LauncherWords(lambda: next(times, 0.0))
    for line in lines:
        words.hear(f"{line}\n".encode())
    return words


@pytest.mark.parametrize(
    ("lines", "bad_end"),
    [
        (["srun: error: n2: task 5: Killed", "srun: Terminating StepId=7.0"], BadEnd("srun", (5,), signal=9)),
        (["srun: error: n[1-2]: tasks 0-2,5: Bus error (core dumped)"], BadEnd("srun", (0, 1, 2, 5), signal=7)),
        (["srun: error: n2: task 5: Out Of Memory"], BadEnd("srun", (5,), signal=9, is_out_of_memory=True)),
        (["srun: error: n1: task 0: Exited with exit code 3"], BadEnd("srun", (0,), exit_code=3)),
        (["srun: error: n1: tasks 0-1: Terminated", "srun: error: n2: task 2: Killed"], BadEnd("srun", (0, 1), 15)),
        (["srun: error: Unable to create step for job 7: More processors requested than permitted"], None),
        (["srun: job 7 queued and waiting for resources"], None),
        (
            [
                "prterun noticed that process rank 1 with PID 2525 on node vm exited on",
                "signal 11 (Segmentation fault).",
            ],
            BadEnd("mpirun", (1,), signal=11),
        ),
        (
            ["mpirun noticed that process rank 3 with PID 0 on node n1 exited on signal 9 (Killed)."],
            BadEnd("mpirun", (3,), signal=9),
        ),
        (["2026-11-29T22:10:03.123 n2 r3 | srun: error: n2: task 5: Killed"], None),
    ],
)
def test_the_first_bad_end_is_known_by_task_and_by_how_it_came(lines: list[str], bad_end: BadEnd | None) -> None:
    lines = ["2026-11-29T22:10:03.123 n1 r0 | step 3/6 | loss 1.0", *lines, "srun: error: n3: task 7: Aborted"]
    if bad_end is None:
        bad_end = BadEnd("srun", (7,), signal=6)
    assert heard(lines).first_bad_end == bad_end


@pytest.mark.parametrize(("last", "tasks"), [(1.5, (0, 1, 2, 3)), (5.0, (0, 1, 2))])
def test_of_those_that_were_killed_all_are_told_that_were_so_at_once(last: float, tasks: tuple[int, ...]) -> None:
    """Where srun itself ends the others it does so after KillWait."""
    lines = ["srun: error: n1: tasks 0-1: Killed", "srun: error: n2: task 2: Killed", "srun: error: n2: task 3: Killed"]
    assert heard(lines, [0.0, 0.1, last]).first_bad_end == BadEnd("srun", tasks, signal=9)
    lines[1] = "srun: error: n2: task 2: Out Of Memory"
    assert heard(lines, [0.0, 0.1, last]).first_bad_end == BadEnd("srun", tasks, signal=9, is_out_of_memory=True)


def test_that_a_task_could_not_be_started_is_kept() -> None:
    told = "srun: error: task 0 launch failed: Unspecified error"
    assert heard([told, *["srun: error: n4: task 3: Killed"] * 9]).said[0] == told


def test_of_those_that_were_interrupted_all_are_told_and_that_srun_was_is_kept() -> None:
    """As seen after scancel --signal=INT, and after two SIGINT to srun."""
    lines = ["srun: error: n1: tasks 0-1: Interrupt", "srun: error: n3: task 4: Exited with exit code 1"]
    assert heard([*lines, "srun: error: n2: task 2: Interrupt"]).first_bad_end == BadEnd("srun", (0, 1, 2), signal=2)
    told = "srun: sending Ctrl-C to StepId=2.1"
    more = ["srun: forcing job termination", *[f"srun: error: n{node}: task {node}: Killed" for node in range(9)]]
    asked = "srun: interrupt (one more within 1 sec to abort)"
    assert heard([asked, told, *more]).said == (told, *more[-5:])


@pytest.mark.parametrize(("later", "is_it"), [(0.5, True), (5.0, False)])
def test_an_abort_is_passed_over_for_a_death_at_the_same_time(later: float, is_it: bool) -> None:
    """Libraries abort ranks that have lost another one."""
    lines = ["srun: error: n1: task 0: Aborted (core dumped)", "srun: error: n2: task 2: Killed"]
    abort, death = BadEnd("srun", (0,), signal=6), BadEnd("srun", (2,), signal=9)
    assert heard(lines, [0.0, later]).first_bad_end == (death if is_it else abort)


def test_a_signal_that_asks_for_an_end_is_no_death() -> None:
    assert BadEnd("srun", (0,), signal=9).is_death
    assert not BadEnd("srun", (0,), signal=15).is_death
    assert not BadEnd("srun", (0,), exit_code=9).is_death


def test_that_slurm_ended_a_step_is_kept_however_many_lines_follow() -> None:
    cancelled = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-30T10:00:00 DUE TO PREEMPTION ***"
    killed = [f"srun: error: n{node}: tasks {node}-{node + 7}: Killed" for node in range(100)]
    assert heard([cancelled, *killed]).said == (cancelled, *killed[-5:])
    assert heard([cancelled, *killed[:3]]).said == (cancelled, *killed[:3])
    over = "slurmstepd: error: StepId=7.0 exceeded memory limit (2097152 > 1048576), being killed"
    assert heard([over, *killed]).said == (over, *killed[-5:])
    assert heard([over, cancelled, *killed]).said == (cancelled, *killed[-5:])
    of_srun = "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-30T10:00:00 ***"
    assert heard([of_srun, *killed]).said == tuple(killed[-5:])


def test_the_time_of_a_line_is_when_it_came_and_not_when_it_could_be_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's log is on a file system that hangs, until srun kills the others for the first one."""
    now, blocked_s = [0.0], iter([30.0, 0.0])
    monkeypatch.setattr(ranks, "write_all", lambda descriptor, data: now.append(now[-1] + next(blocked_s)))
    lines = [b"srun: error: n2: task 2: Killed\n", b"srun: error: n1: tasks 0-1,3: Killed\n"]
    words = LauncherWords(lambda: now[-1])
    ranks._pass_on_errors(cast("subprocess.Popen[bytes]", SimpleNamespace(stderr=lines)), words)
    assert words.first_bad_end == BadEnd("srun", (2,), signal=9)


def test_the_silence_of_an_mpirun_whose_words_are_not_known_says_nothing() -> None:
    """Hydra's, of a rank that ended with 1 before it could record why: no interruption, to be started again."""
    hydra = ["=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES", "=   EXIT CODE: 1"]
    srun = SrunLauncher(1, "pmix", overlap=False, wait_s=0)
    launchers = MpirunLauncher("mpirun", (), is_open_mpi=True), MpirunLauncher("mpirun", ()), srun
    assert [ends_silently(launcher, 1, heard(hydra)) for launcher in launchers] == [True, False, False]
    assert not ends_silently(launchers[0], 1, heard(["mpirun noticed that process rank 3 with PID 1"]))
    assert not ends_silently(launchers[0], 137, heard([]))

"""Agents that have to end at once are ended by who started them on their nodes: by srun, where there is one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_train.launch import children, ranks

_SRUN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda number, frame: (pathlib.Path(sys.argv[1]).write_text("INT"), sys.exit(0)))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("is_srun", "told"), [(True, "INT"), (False, "")])
def test_a_second_stop_ends_agents_that_write_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_srun: bool, told: str
) -> None:
    """An srun that is killed leaves its agents to write on for as long as they may."""
    monkeypatch.setattr(ranks, "_AGENTS_END_S", 0.1)
    note, said = tmp_path / "note", []
    note.write_text("")
    command = [sys.executable, "-c", _SRUN, str(note)]
    agents = children.start_child(command, {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert agents.stdout is not None
    assert agents.stdout.readline() == b"ready\n"
    stopper = SimpleNamespace(forced="the driver got SIGINT")
    ranks._end_agents(agents, 600.0, stopper, said.append, is_srun=is_srun)  # type: ignore[arg-type]
    agents.stdout.close()
    assert agents.returncode is not None and note.read_text() == told
    assert "did not end by themselves" in said[-1]


def test_an_agent_that_is_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_AGENTS_END_S", 0.1)
    said: list[str] = []
    agents = children.start_child([sys.executable, "-c", "input()"], {}, stdin=subprocess.PIPE)
    agents.send_signal(signal.SIGSTOP)
    stopper = SimpleNamespace(forced=None)
    ranks._end_agents(agents, 600.0, stopper, said.append, is_srun=False)  # type: ignore[arg-type]
    assert agents.returncode == -signal.SIGKILL
    assert said == [f"the node agent, process {agents.pid}, is stopped and is ended; what it was writing is not saved"]


def test_an_agent_that_goes_on_behind_its_driver_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of a job were suspended, and the driver looks first, when much time has passed for it."""
    monkeypatch.setattr(ranks, "_AGENTS_END_S", -1.0)
    states = [*[True] * (ranks._STOPPED_LOOKS - 1), False]
    monkeypatch.setattr(children, "is_stopped", lambda pid: states.pop(0) if states else False)
    said: list[str] = []
    agents = children.start_child([sys.executable, "-c", "import time; time.sleep(2)"], {}, stdin=subprocess.PIPE)
    ranks._end_agents(agents, 600.0, SimpleNamespace(forced=None), said.append, is_srun=False)  # type: ignore[arg-type]
    assert agents.returncode == 0 and not any("is stopped" in line for line in said)


_MPIRUN = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
sys.exit(rank.wait() and 1)
"""
_RANK = """
import pathlib, signal, sys, time
note = pathlib.Path(sys.argv[1])
def save(number, frame):
    note.write_text("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR2, save)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("first", "saves"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_ctrl_c_ends_ranks_that_would_save_by_term_and_term_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, saves: bool
) -> None:
    """By the first step already: none comes after it."""
    monkeypatch.setattr(children, "GRACE_S", 3600.0)
    note = tmp_path / "note"
    command = [sys.executable, "-c", _MPIRUN, _RANK, str(note)]
    child = children.start_child(command, {}, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    ways = children.stop_steps(child, is_srun=False, term_saves=True)
    stop_signal = signal.SIGUSR2
    stopper = children.Stopper(child, ways, stop_signal)
    if saves:
        (rank,) = children.descendants(child.pid)
        child.send_signal = lambda number: os.kill(rank, number)  # type: ignore[method-assign] - as mpirun passes it on
    stopper.handle(first, None)
    child.wait(60)
    child.stdout.close()
    assert note.exists() == saves
    assert (stopper.forced is None) == saves

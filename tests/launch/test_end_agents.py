"""Agents that have to end at once are ended by who started them on their nodes: by srun, where there is one."""

from __future__ import annotations

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

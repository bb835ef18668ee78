"""Faults that a test plans and ranks then really suffer: an exception, SIGKILL, SIGSTOP, a hang; slow steps."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "HPC_TRAIN_TEST_FAULTS"


@dataclass(frozen=True)
class FaultPlan:
    """Faults by rank and step. `environment` carries them to the ranks, which meet them before that step's work."""

    faults: tuple[tuple[str, int, int], ...] = ()

    def fail(self, *, rank: int, step: int) -> FaultPlan:
        """An exception that nobody expected."""
        return FaultPlan((*self.faults, ("fail", rank, step)))

    def kill(self, *, rank: int, step: int) -> FaultPlan:
        """SIGKILL, as from the kernel when memory is out."""
        return FaultPlan((*self.faults, ("kill", rank, step)))

    def hang(self, *, rank: int, step: int) -> FaultPlan:
        """A sleep in Python until somebody makes the file `go_on` in the run folder."""
        return FaultPlan((*self.faults, ("hang", rank, step)))

    def stop(self, *, rank: int, step: int) -> FaultPlan:
        """SIGSTOP: the process is there, and does nothing until it gets SIGCONT."""
        return FaultPlan((*self.faults, ("stop", rank, step)))

    def slow(self, milliseconds: int) -> FaultPlan:
        """Every rank sleeps so long before each of its steps."""
        return FaultPlan((*self.faults, ("slow", milliseconds, 0)))

    def environment(self) -> dict[str, str]:
        path = [str(Path(__file__).parent / "hook"), os.environ.get("PYTHONPATH", "")]
        return {VARIABLE: json.dumps(self.faults), "PYTHONPATH": os.pathsep.join(filter(None, path))}

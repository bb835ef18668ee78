"""Real jobs that are interrupted in one way or another and put back into the queue, several at a time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.faults.plan import VARIABLE, FaultPlan
from tests.train.runs import last_step, whole_lines, write_config, write_corpus

ROOT = Path(__file__).parents[2]


@dataclass
class Interruption:
    """What is done to a run, and after which of its steps. `act` gets Slurm's name of the job (`12` or `12_1`).

    Each one waits until the start that followed on the one before has taken a step: a job that is on its way back into
    the queue gets no signal.
    """

    step: int
    act: Callable[[str], object]


@dataclass
class Case:
    """A job to submit. array: a list of tasks, of which the last one is watched; the others run beside it."""

    name: str
    via: str = "sbatch"
    array: str | None = None
    num_nodes: int = 1
    flags: Sequence[str] = ()
    overrides: Sequence[str] = ()
    interruptions: list[Interruption] = field(default_factory=list)
    num_interrupted: int = 0
    job: str = ""
    folder: Path = Path()
    others: list[Path] = field(default_factory=list)

    def outcome(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "outcome.json").read_text())
        except (OSError, ValueError):
            return {}

    def attempts(self) -> list[dict[str, Any]]:
        return whole_lines(self.folder / "attempts.jsonl")

    def last_step(self) -> int:
        return last_step(self.folder)

    def is_due(self) -> bool:
        """Whether the next interruption is to come now."""
        if not self.interruptions or len(starts := self.attempts()) <= self.num_interrupted:
            return False
        return self.last_step() >= max(self.interruptions[0].step, (starts[-1]["saved_step"] or 0) + 1)

    def interrupt(self) -> None:
        self.num_interrupted += 1
        self.interruptions.pop(0).act(self.job)

    def log(self) -> str:
        texts = [path.read_text() for path in sorted((self.folder / "logs").glob("*.log"))]
        return "\n".join([f"==== {self.name}", *texts])

    def is_over(self) -> bool:
        """Whether no further start comes."""
        comes_back = ("interrupted", "failed") if "launch.requeue=failed" in self.overrides else ("interrupted",)
        return self.outcome().get("outcome", "interrupted") not in comes_back


class Centre:
    """Submits cases on a cluster, interrupts them, and waits for their ends."""

    def __init__(self, slurm: Any, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder

    def prepare(self, faults: FaultPlan, **train: object) -> None:
        if not (self.folder / "corpus.idx").exists():
            write_corpus(self.folder / "corpus")
        path = write_config(self.folder, launch={"env": {VARIABLE: faults.environment()[VARIABLE]}}, **train)
        tree = yaml.safe_load(path.read_text())
        tree["checkpoint"] = {"keep": 2}
        path.write_text(yaml.safe_dump(tree))

    def hpc_train(self, *words: str) -> Any:
        hook = FaultPlan().environment()["PYTHONPATH"].partition(":")[0]
        shell = 'cd "$1"; shift; exec "$@"'
        command = ["bash", "-c", shell, "-", str(self.folder), sys.executable, "-m", "hpc_train", *words]
        return self.slurm.run(command, timeout=120, env={"PYTHONPATH": f"{hook}:{ROOT}", "OMP_NUM_THREADS": "1"})

    def submit(self, case: Case, *flags: str) -> None:
        words = ["submit", str(self.folder / "config.yaml"), f"name={case.name}", *case.overrides, "--via", case.via]
        words += ["-N", str(case.num_nodes), "--ntasks-per-node", "2", "--parsable", *case.flags, *flags]
        if case.array:
            words += ["--array", case.array]
        submitted = self.hpc_train(*words)
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        job_id = submitted.stdout.split()[-1]
        tasks = case.array.split(",") if case.array else []
        case.job = f"{job_id}_{tasks[-1]}" if tasks else job_id
        runs = self.folder / "runs" / case.name
        case.folder = runs / case.job
        case.others = [runs / f"{job_id}_{task}" for task in tasks[:-1]]

    def processes(self) -> list[str]:
        """Processes of ranks or agents of these runs that are still there."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if f"HPC_TRAIN_RUN_DIR={self.folder}".encode() in (path / "environ").read_bytes():
                    found.append((path / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found

    def queue(self) -> str:
        """All that is in the queue, by Slurm's own words."""
        return self.slurm.run(["squeue", "--noheader"]).stdout

    def scancel(self, *words: str) -> Callable[[str], object]:
        return lambda job: self.slurm.run(["scancel", *words, job])

    def see_to_the_end(self, cases: Sequence[Case], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not all(case.is_over() for case in cases):
            assert time.monotonic() < deadline, "\n".join(case.log() for case in cases if not case.is_over())
            for case in cases:
                if case.is_due():
                    case.interrupt()
            time.sleep(0.3)

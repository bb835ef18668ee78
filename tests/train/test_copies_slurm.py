"""Jobs on a real Slurm cluster whose ranks are killed between saves: they go on from the nodes' disks to the bit."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint.copies.local_folder import folder_of_run
from hpc_train.checkpoint.copies.local_parts import sound_parts
from tests.faults.plan import FaultPlan
from tests.train.requeued import Case, Centre, Interruption
from tests.train.runs import hpc_train, metrics

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

EVERY = 5
"""Steps between saves to the store; the disks get each step."""


class _Kill:
    """SIGKILL to one rank, at a random moment; then some of the nodes lose what is on their disks."""

    def __init__(self, centre: Centre, disks: Path, case: Callable[[], Case], lost: Callable[[list[int]], list[int]]):
        """lost: by the nodes' keepers, which nodes lose their disks."""
        self._centre, self._disks, self._case, self._lost = centre, disks, case, lost
        self.last_step, self.whole_step, self.at = 0, 0, 0.0

    def __call__(self, job: str) -> None:
        case, random_ = self._case(), random.Random()
        time.sleep(random_.random())
        victim = random_.choice(self._ranks())
        self.last_step = case.last_step()
        self.at = time.time()
        os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + 60.0
        while any("node_agent" in words for words in self._centre.processes()):
            assert time.monotonic() < deadline, case.log()
            time.sleep(0.05)
        holders = json.loads((case.folder / "plan.json").read_text())["copy_holders"]
        for node in self._lost(holders):
            (disk,) = (self._disks / f"n{node + 1}").iterdir()
            shutil.rmtree(disk)
        self.whole_step = self._newest_whole(case)
        if not case.interruptions:
            (case.folder / "go_on").touch()

    def _newest_whole(self, case: Case) -> int:
        """The last step of which the disks have the parts of all nodes."""
        nodes_of = defaultdict[int, set[int]](set)
        for disk in self._disks.iterdir():
            if (folder := folder_of_run(str(disk), case.folder, {})).is_dir():
                for record in sound_parts(folder)[0]:
                    nodes_of[record.name.step].add(record.name.node)
        return max((step for step, nodes in nodes_of.items() if len(nodes) == case.num_nodes), default=0)

    def _ranks(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_text().split("\0")
                environ = (path / "environ").read_bytes()
            except OSError:
                continue
            is_rank = words[1:4] == ["-m", "hpc_train", "run"] and b"HPC_TRAIN_ATTEMPT=" in environ
            if is_rank and f"HPC_TRAIN_RUN_DIR={self._case().folder}\0".encode() in environ:
                found.append(int(path.name))
        assert found, self._case().log()
        return found


def _run(centre: Centre, num_nodes: int, steps: int, lost: list[Callable[[list[int]], list[int]]]) -> tuple[Any, Any]:
    """A job that is killed once for each of `lost`: what was gone on from after each kill, and the kills."""
    rows: dict[str, Any] = {"steps": steps, "eval_every": 10, "global_batch_size": 2 * num_nodes}
    centre.prepare(FaultPlan().slow(0), **rows)
    words = ["run", str(centre.folder / "config.yaml"), "-n", str(num_nodes), "--run-dir", str(centre.folder / "alone")]
    alone = hpc_train([*words, f"checkpoint.every={EVERY}"])
    assert alone.returncode == 0, alone.stdout + alone.stderr
    # The last step waits for the last kill.
    centre.prepare(FaultPlan().slow(300).hang(rank=0, step=steps), **rows)
    disks = centre.folder / "disks"
    for node in range(1, num_nodes + 1):
        (disks / f"n{node}").mkdir(parents=True)
    kills = [_Kill(centre, disks, lambda: case, which) for which in lost]
    case = Case(
        "copied",
        num_nodes=num_nodes,
        flags=["-w", f"n[1-{num_nodes}]", "--ntasks-per-node", "1"],
        overrides=[
            "launch.requeue=failed", f"checkpoint.every={EVERY}", "checkpoint.local.every=1",
            f"checkpoint.local.path={disks}/$SLURMD_NODENAME",
        ],
        interruptions=[
            Interruption((number + 1) * steps // (len(kills) + 1), kill) for number, kill in enumerate(kills)
        ],
    )  # fmt: skip
    centre.submit(case)
    centre.see_to_the_end([case], timeout_s=90 * (len(kills) + 1))
    assert case.outcome()["exit_code"] == 0, case.log()
    assert metrics(case.folder) == metrics(centre.folder / "alone"), case.log()
    assert not list(disks.rglob("*.distcp")), "the store has the last step"
    said = (case.folder / "logs" / "n1.log").read_text()
    resumed = re.findall(r"resumed from (\S+) at step (\d+)", said)
    lines = map(json.loads, (case.folder / "metrics.jsonl").read_text().splitlines())
    ended = {line["step"]: line["time"] for line in lines}
    for (path, step), kill in zip(resumed, kills, strict=True):
        from_where = "the disks" if path.startswith(str(disks)) else "the store"
        back_s = ended[int(step) + 1] - kill.at
        print(f"killed at step {kill.last_step}: on from step {step} of {from_where}, one step on after {back_s:.1f} s")
    return [(path, int(step), kill) for (path, step), kill in zip(resumed, kills, strict=True)], said


def _none(holders: list[int]) -> list[int]:
    return []


def _one(holders: list[int]) -> list[int]:
    return [1]


def _both(holders: list[int]) -> list[int]:
    """A node and the one that keeps its copy."""
    return [1, holders[1]]


def _check(resumed: list[tuple[str, int, _Kill]], base: Path, lost: list[Callable[[list[int]], list[int]]]) -> None:
    """Each start went on from the last step that is whole on the disks, or from the store if both copies are gone."""
    for (path, step, kill), which in zip(resumed, lost, strict=True):
        seen = (path, step, kill.whole_step, kill.last_step)
        if which is not _both:
            assert path.startswith(f"{base}/disks/n1/") and step == kill.whole_step > 0, seen
        else:
            assert path.endswith(f"/checkpoints/step_{step:07d}") and path.startswith(f"{base}/runs/copied/"), seen
            assert step % EVERY == 0 and kill.last_step - EVERY - 1 <= step <= kill.last_step + 1, seen


def test_a_killed_job_that_lost_a_node_s_disk_goes_on_from_the_keeper_s_bit_for_bit(slurm: Any, tmp_path: Path) -> None:
    resumed, said = _run(Centre(slurm, tmp_path), 2, 12, [_one])
    _check(resumed, tmp_path, [_one])
    assert "is whole on the nodes' own disks: 2 parts, 1 of them on other nodes than before" in said


@pytest.mark.long
def test_a_killed_job_goes_on_from_its_nodes_disks_then_a_keeper_s_and_last_the_store(
    slurm: Any, tmp_path: Path
) -> None:
    lost = [_none, _one, _both]
    resumed, said = _run(Centre(slurm, tmp_path), 3, 24, lost)
    _check(resumed, tmp_path, lost)
    assert "is whole on the nodes' own disks: 3 parts" in said and "1 of them on other nodes than before" in said
    assert "node 1's first, are sound on no node of this job" in said


@pytest.mark.long
def test_many_kills_at_random_moments_lose_no_step_that_is_whole_somewhere(slurm: Any, tmp_path: Path) -> None:
    lost = [_none, _one, _none, _both, _one, _none, _both, _none]
    resumed, _ = _run(Centre(slurm, tmp_path), 4, 80, lost)
    _check(resumed, tmp_path, lost)

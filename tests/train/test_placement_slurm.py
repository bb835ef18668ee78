"""Placement in a real Slurm job on nodes that Slurm had to pick from what another job left."""

from __future__ import annotations

import json
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_train.plan.mesh import AXES
from hpc_train.plan.run import Plan
from tests.train.runs import metrics, write_config, write_corpus

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
TAKEN, LEFT = "n2,n5,n7,n8", ["n1", "n3", "n4", "n6"]
ENV = {"PYTHONPATH": f"{Path(__file__).parent / 'witness'}:{ROOT}", "OMP_NUM_THREADS": "1"}

# A fabric that does not follow the names: what Slurm puts side by side is far apart.
CROSSED = {
    "version": 1,
    "pods": {
        "a": {"core": "core", "leaves": {"a0": {"nodes": "n1,n4"}}},
        "b": {"core": "core", "leaves": {"b0": {"nodes": "n3,n6"}}},
    },
}


def run_line(folder: Path, name: str, *overrides: str) -> str:
    words = ["run", str(folder / "config.yaml"), "--run-dir", str(folder / name), *overrides]
    return shlex.join([sys.executable, "-m", "hpc_train", *words])


def formed(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads((run_dir / f"formed/{rank}.json").read_text()) for rank in range(8)]


def check_against_plan(run_dir: Path) -> Plan:
    """The groups in which ranks really met are the planned ones, and no tp group has two nodes."""
    plan = Plan.from_json((run_dir / "plan.json").read_text())
    rows = [line.split("\t") for line in (run_dir / "ranks.tsv").read_text().splitlines()[1:]]
    for rank, told in enumerate(formed(run_dir)):
        planned = plan.ranks[rank]
        assert (told["me"]["node"], told["me"]["slot"]) == (planned.node, planned.gpu)
        assert rows[rank][7] in ("-", str(told["me"]["procid"]))
        for axis in AXES:
            ranks = [peer["rank"] for peer in told["met"][axis]]
            assert tuple(ranks) == plan.mesh.group_of(rank, axis)
            assert [(peer["node"], peer["slot"]) for peer in told["met"][axis]] == [
                (plan.ranks[peer].node, plan.ranks[peer].gpu) for peer in ranks
            ]
        assert len({peer["node"] for peer in told["met"]["tp"]}) == 1
    for node in plan.nodes:
        said = {
            int(found)
            for found in re.findall(rf"(?m)^\S+ {node} r(\d+) \|", (run_dir / f"logs/{node}.log").read_text())
        }
        assert said == {planned.rank for planned in plan.ranks if planned.node == node}
    return plan


@pytest.fixture
def fragmented(slurm: Any) -> Any:
    """The cluster with four nodes taken by another job."""
    blocker = ["sbatch", "--parsable", "-N4", f"--nodelist={TAKEN}", "--exclusive", "--wrap", "sleep 600"]
    job = slurm.run([*blocker, "-o", "/dev/null"], timeout=30)
    assert job.returncode == 0, job.stderr
    yield slurm
    slurm.run(["scancel", job.stdout.strip()], timeout=30)


def numbered(distribution: str, folder: Path) -> str:
    """What has srun number the tasks in that way."""
    if distribution != "arbitrary":
        return f"launch.srun_options=[--distribution={distribution}]"
    (folder / "hosts").write_text("\n".join(["n6", "n1", "n4", "n3", "n3", "n6", "n1", "n4"]) + "\n")
    return f"launch.srun_options=[--distribution=arbitrary, --nodelist={folder / 'hosts'}]"


@pytest.mark.parametrize("distribution", ["arbitrary", pytest.param("cyclic", marks=pytest.mark.long)])
def test_ranks_meet_as_planned_under_every_distribution_and_train_alike(
    fragmented: Any, tmp_path: Path, distribution: str
) -> None:
    """In blocks on the fabric that Slurm knows, and in another order on one of a file."""
    write_corpus(tmp_path / "corpus")
    path = write_config(tmp_path, steps=2, eval_every=0, global_batch_size=8)
    tree = yaml.safe_load(path.read_text())
    tree["model"] |= {"num_layers": 2, "num_heads": 4}
    tree["parallel"] = {"pp": 2, "dp": 2, "tp": 2}
    tree["checkpoint"] = {"at_end": False}
    path.write_text(yaml.safe_dump(tree))
    crossed = tmp_path / "fabric.yaml"
    crossed.write_text(yaml.safe_dump(CROSSED))
    lines = [
        run_line(tmp_path, "block"),
        run_line(tmp_path, distribution, f"fabric.source={crossed}", numbered(distribution, tmp_path)),
        shlex.join([sys.executable, "-m", "hpc_train", "exec", "--run-dir", str(tmp_path / "exec"), "--fabric"])
        + f" {crossed} -- sh -c 'echo $RANK $SLURMD_NODENAME'",
    ]
    script = "set -e\n" + "\n".join(lines)
    command = ["salloc", "--quiet", "-N4", "--ntasks-per-node=2", "--gpus-per-node=2", "bash", "-c", script]
    done = fragmented.run(command, timeout=500, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr

    plans = {name: check_against_plan(tmp_path / name) for name in ("block", distribution)}
    for name, plan in plans.items():
        assert sorted(plan.nodes) == LEFT
        assert metrics(tmp_path / name) == metrics(tmp_path / "block")
        hops = plan.further["traffic"]["byte_hops"]
        assert hops["planned"] < hops["slurm_order"]
        assert (tmp_path / name / "plan.html").stat().st_size > 1000
        said = (tmp_path / name / "logs/job.log").read_text()
        assert "placement: byte-hops " in said
        assert "NCCL_IB_TIMEOUT=22 (was not set)" in said
    procids = [told["me"]["procid"] for told in formed(tmp_path / distribution)]
    assert procids != sorted(procids)
    # Where the order is srun's own it is known before it starts the tasks.
    known = "block" if distribution == "arbitrary" else distribution
    rows = [line.split("\t") for line in (tmp_path / known / "ranks.tsv").read_text().splitlines()[1:]]
    assert [int(row[7]) for row in rows] == [told["me"]["procid"] for told in formed(tmp_path / known)]
    told = [line.split("| ")[-1].split() for line in done.stdout.splitlines() if line.split("| ")[-1][1:3] == " n"]
    nodes = [node for _, node in sorted(told, key=lambda words: int(words[0]))]
    assert nodes[::2] == nodes[1::2] == ["n1", "n4", "n3", "n6"]
    assert sum(a != b for a, b in pairwise(nodes)) == 3

"""The fabric of real Slurm jobs: addresses gathered from their nodes, and scontrol's own word for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_exec_mpi import ROOT

pytestmark = pytest.mark.slurm

ENV = {"PYTHONPATH": str(ROOT)}
_PROGRAM = """
import json, os, sys
from hpc_train.cluster.allocation import allocation_from_job
from hpc_train.cluster.environment import process_env
from hpc_train.cluster.fabric_find import find_fabric
from hpc_train.cluster.slurm import read_job
from hpc_train.config import FabricConfig
from hpc_train.launch.fabric_step import fabric_of_run

env = process_env()
allocation = allocation_from_job(read_job(env))
asked = fabric_of_run(FabricConfig(), allocation, env, is_in_job=True)
told = find_fabric(None, allocation.nodes, env)
def found(item):
    fabric = item.fabric
    return {"leaf": {name: fabric.nodes[name].leaf(0) for name in allocation.nodes}, "pods": dict(fabric.pod_of_leaf),
            "core": dict(fabric.core_of_pod), "gpus": [fabric.nodes[name].num_gpus for name in allocation.nodes],
            "source": fabric.source, "notes": item.notes}
print(json.dumps({"nodes": allocation.nodes, "asked": found(asked), "told": found(told)}))
"""


@pytest.fixture(autouse=True)
def in_a_folder_that_all_nodes_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_nodes_are_asked_and_agree_with_scontrol(slurm: Any) -> None:
    """FC-46: the address of the first node alone would put all nodes below its leaf."""
    job = ["salloc", "--quiet", "-w", "n1,n2,n4,n8", "-N4", "--ntasks-per-node=1", "--gpus-per-node=8"]
    done = slurm.run([*job, sys.executable, "-c", _PROGRAM], timeout=110, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    asked, told = answer["asked"], answer["told"]
    assert answer["nodes"] == ["n1", "n2", "n4", "n8"]
    assert (asked["source"], told["source"]) == ("SLURM_TOPOLOGY_ADDR", "scontrol show topology")
    assert asked["leaf"] == told["leaf"]
    assert len(set(asked["leaf"].values())) > 1
    for leaf, pod in asked["pods"].items():
        assert (pod, asked["core"][pod]) == (told["pods"][leaf], told["core"][pod])
    assert asked["gpus"] == [8] * 4
    assert asked["notes"] == ["fabric from SLURM_TOPOLOGY_ADDR"]


def test_a_source_without_the_job_s_nodes_is_refused_in_words(slurm: Any) -> None:
    Path("old.conf").write_text("SwitchName=s Nodes=n[1-2]\n")
    program = _PROGRAM.replace("FabricConfig()", "FabricConfig(source='old.conf')")
    done = slurm.run(["salloc", "--quiet", "-w", "n2,n3", "-N2", sys.executable, "-c", program], timeout=60, env=ENV)
    assert "n3 of the job's 2 nodes is not in the fabric of old.conf, which has 2 nodes such as n1, n2" in done.stderr

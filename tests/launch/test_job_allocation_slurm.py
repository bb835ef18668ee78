"""GPUs of each node of real Slurm jobs that asked for a number in all."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_exec_mpi import ROOT

pytestmark = pytest.mark.slurm

_PROGRAM = """
import argparse
from hpc_train.cluster.allocation import job_without
from hpc_train.cluster.environment import process_env
from hpc_train.cluster.slurm import read_job
from hpc_train.launch.driver import find_allocation

job = read_job(process_env())
asked = argparse.Namespace(ranks=None, ranks_per_node=None)
for one in (job, job_without(job, job.nodes[0])):
    found = find_allocation(asked, one, "here")
    print(len(found.nodes), sum(found.gpus_per_node), found.tasks_per_node == found.gpus_per_node, found.warnings)
print(find_allocation(asked, job, "here").gpus_per_node)
"""


def test_tasks_of_an_array_know_the_gpus_of_their_own_nodes(
    slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last task's job id is the whole array's, of which scontrol shows all tasks."""
    monkeypatch.chdir(tmp_path)
    script = f"{sys.executable} -c {shlex.quote(_PROGRAM)}"
    job = ["sbatch", "--wait", "--array=1-2", "-N2", "--gpus=3", "--output=%a.out", f"--wrap={script}"]
    done = slurm.run(job, timeout=110, env={"PYTHONPATH": str(ROOT)})
    outputs = [Path(f"{task}.out").read_text() for task in (1, 2)]
    assert done.returncode == 0, done.stdout + done.stderr + "".join(outputs)
    for output in outputs:
        whole, rest, gpus = output.splitlines()
        assert whole == "2 3 True ()"
        assert gpus in ("(2, 1)", "(1, 2)")
        assert rest == f"1 {gpus[-2]} True ()"

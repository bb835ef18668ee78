"""Training on a real Slurm cluster of 8 virtual nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.plan import VARIABLE, FaultPlan
from tests.train.forked_runs import train_forked
from tests.train.runs import metrics, write_config, write_corpus

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _hpc_train(slurm: Any, cwd: Path, *words: str, prefix: tuple[str, ...] = (), env: dict[str, str] = ENV) -> Any:
    shell = 'cd "$1"; shift; exec "$@"'  # the cluster's hosts share our files, not our working folder
    command = [*prefix, sys.executable, "-m", "hpc_train", *words]
    return slurm.run(["bash", "-c", shell, "-", str(cwd), *command], timeout=240, env=env)


def _submit(slurm: Any, folder: Path, run: str, env: dict[str, str] = ENV) -> Any:
    words = ["submit", str(folder / "config.yaml"), "-N", "4", "--ntasks-per-node", "2", "--follow"]
    return _hpc_train(slurm, folder, *words, "--run-dir", str(folder / run), env=env)


def test_a_job_of_4_nodes_killed_in_the_middle_and_submitted_again_ends_as_one_left_alone_bit_for_bit(
    slurm: Any, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "corpus")
    kill = FaultPlan().kill(rank=5, step=5).environment()
    write_config(tmp_path, global_batch_size=8, launch={"env": {VARIABLE: kill[VARIABLE]}})
    killed = _submit(slurm, tmp_path, "killed", {**ENV, "PYTHONPATH": f"{kill['PYTHONPATH']}:{ROOT}"})
    assert killed.returncode == 1, killed.stdout + killed.stderr
    failure = json.loads((tmp_path / "killed/failure.json").read_text())
    assert (failure["rank"], failure["kind"]) == (5, "ended")
    assert "killed by signal 9 (SIGKILL)" in failure["message"]
    assert [line["step"] for line in metrics(tmp_path / "killed")] == [1, 2, 3, 4]
    write_config(tmp_path, global_batch_size=8)
    again = _submit(slurm, tmp_path, "killed")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resumed from" in again.stdout
    assert metrics(tmp_path / "killed") == train_forked(tmp_path, "alone", 8)
    table = [line.split("\t") for line in (tmp_path / "killed/ranks.tsv").read_text().splitlines()[1:]]
    assert len({row[1] for row in table}) == 4
    assert sorted((row[2], row[3]) for row in table) == [(str(node), slot) for node in range(4) for slot in "01"]


def test_a_container_that_hides_srun_from_mpi_ends_every_rank_with_code_3_within_seconds_and_one_message(
    slurm: Any, tmp_path: Path
) -> None:
    """FC-09: four tasks of which each would train alone. The wrapper is a real program before each rank."""
    write_corpus(tmp_path / "corpus")
    hides = ["env", "-u", "PMIX_NAMESPACE", "-u", "PMIX_RANK"]
    # Nobody waits for a rank that does not come: that would take longer than this test may.
    write_config(tmp_path, launch={"wrap": hides, "timeout_s": 600})
    words = ["run", str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path / "run")]
    result = _hpc_train(slurm, tmp_path, *words, prefix=("salloc", "--quiet", "-N2", "--ntasks-per-node=2"))
    assert result.returncode == 3, result.stdout + result.stderr
    logs = "".join(path.read_text() for path in (tmp_path / "run/logs").glob("n*.log"))
    said = [line for line in logs.splitlines() if "| error (rank" in line]
    assert len(said) == 1
    assert "started 4 tasks and this is number 0, but MPI says rank 0 of 1" in said[0]
    assert "--mpi=pmix" in said[0]
    record = json.loads((tmp_path / "run/failure.json").read_text())
    assert record["exit_code"] == 3
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_script_of_ones_own_under_the_wrong_pmi_ends_with_code_3_on_every_task(slurm: Any, tmp_path: Path) -> None:
    """FC-09: the library call; srun's code is the highest of its tasks, and the least is 3 too."""
    script = tmp_path / "script.py"
    script.write_text("import hpc_train\nhpc_train.bootstrap()\n")
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(f'{sys.executable} {script}; code=$?; echo "task $SLURM_PROCID code $code"; exit $code\n')
    result = slurm.run(
        ["srun", "--mpi=pmi2", "-N2", "-n4", "--ntasks-per-node=2", "bash", str(wrapper)],
        timeout=100,
        env=ENV,
    )
    codes = sorted(line for line in result.stdout.splitlines() if line.startswith("task"))
    assert codes == [f"task {rank} code 3" for rank in range(4)], result.stdout + result.stderr
    assert result.stderr.count("does not speak PMI2") == 1


@pytest.mark.long
def test_a_node_that_is_excluded_gets_no_ranks(slurm: Any, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    write_config(tmp_path, global_batch_size=8)
    words = ["run", str(tmp_path / "config.yaml"), "fabric.exclude=n[2,7]", "--run-dir", str(tmp_path / "run")]
    job = ("salloc", "--quiet", "-w", "n[1-3]", "-N3", "--ntasks-per-node=2")
    result = _hpc_train(slurm, tmp_path, *words, prefix=job)
    assert result.returncode == 0, result.stdout + result.stderr
    table = [line.split("\t") for line in (tmp_path / "run/ranks.tsv").read_text().splitlines()[1:]]
    assert [row[1] for row in table] == ["n1", "n1", "n3", "n3"]

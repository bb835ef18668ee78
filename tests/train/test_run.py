"""The whole command on one machine: it trains, resumes exactly, and refuses bad input on every rank at once."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hpc_train.cli import main
from hpc_train.errors import CheckpointError, DataError, ExitCode, HpcTrainError
from tests.faults.plan import FaultPlan
from tests.train.forked_runs import train_forked
from tests.train.runs import hpc_train, metrics, write_config, write_corpus

pytestmark = pytest.mark.mpi


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus")
    return tmp_path


def _run(folder: Path, *overrides: str, run: str = "run", num_ranks: int = 2, faults: FaultPlan | None = None):
    return hpc_train(
        ["run", folder / "config.yaml", "-n", num_ranks, "--run-dir", folder / run, *overrides],
        env=faults.environment() if faults else None,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A run on two ranks that nobody disturbs, and its folder, which several tests look at."""
    folder = tmp_path_factory.mktemp("alone")
    write_corpus(folder / "corpus")
    write_config(folder)
    result = _run(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return result, folder / "run"


def test_a_run_leaves_metrics_checkpoints_plan_and_outcome(alone):
    result, run = alone
    lines = metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    assert (run / "checkpoints/latest").read_text() == "step_0000006\n"
    outcome = json.loads((run / "outcome.json").read_text())
    assert (outcome["outcome"], outcome["exit_code"], outcome["attempt"]) == ("done", 0, 1)
    assert {"config.yaml", "env.txt"} <= {path.name for path in run.iterdir()}
    assert not (run / "owner.json").exists()
    assert json.loads((run / "plan.json").read_text())["world_size"] == 2
    assert (run / "ranks.tsv").read_text().splitlines()[0].split("\t")[:3] == ["rank", "host", "node_rank"]
    assert "2 ranks on 1 node" in (run / "plan.txt").read_text()
    assert (run / "plan.html").read_text().rstrip().endswith("</html>")
    assert "placement: all ranks on" in (run / "logs/job.log").read_text()
    assert re.search(r"r0 \| step 6/6 \| loss", result.stdout)


def test_a_run_killed_in_the_middle_continues_and_ends_as_one_left_alone_bit_for_bit(folder, alone):
    write_config(folder)
    killed = _run(folder, run="killed", faults=FaultPlan().kill(rank=1, step=4))
    assert killed.returncode == ExitCode.INTERNAL
    _check_that_rank_1_is_named(folder / "killed", killed)
    assert [line["step"] for line in metrics(folder / "killed")] == [1, 2, 3]
    again = _run(folder, run="killed")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resumed from" in again.stdout
    assert metrics(folder / "killed") == metrics(alone[1])


def _check_that_rank_1_is_named(run: Path, result: subprocess.CompletedProcess[str]) -> None:
    """With its signal, and not the neighbour that lost it."""
    record = json.loads((run / "failure.json").read_text())
    assert (record["rank"], record["kind"], record["exit_code"]) == (1, "ended", 1)
    assert "killed by signal 9 (SIGKILL)" in record["message"]
    assert f"first failure: rank 1 on {record['host']}" in result.stderr
    reason = json.loads((run / "outcome.json").read_text())["reason"]
    assert reason == f"rank 1 on {record['host']}: {record['message']}"
    agent = next((run / "logs").glob("agent-*.log")).read_text()
    assert re.search(r"rank 1, process \d+, is gone without a word", agent)


def test_a_run_killed_between_saves_goes_on_from_its_node_s_own_disk_bit_for_bit(folder):
    write_config(folder)
    disk = folder / "disk"
    disk.mkdir()
    copies = ("checkpoint.every=0", f"checkpoint.local.path={disk}", "checkpoint.local.every=1")
    assert _run(folder, *copies, num_ranks=1, faults=FaultPlan().kill(rank=0, step=5)).returncode != 0
    again = _run(folder, *copies, num_ranks=1)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"resumed from {disk}" in again.stdout
    assert metrics(folder / "run") == train_forked(folder, "alone", 1)
    assert not list(disk.rglob("*.distcp")), "the store has the last step"


def test_a_run_killed_before_its_first_checkpoint_begins_anew_and_has_each_step_once(folder):
    write_config(folder)
    killed = _run(folder, "checkpoint.every=0", num_ranks=1, faults=FaultPlan().kill(rank=0, step=3))
    assert killed.returncode != 0
    assert _run(folder, "checkpoint.every=0", num_ranks=1).returncode == 0
    assert [line["step"] for line in metrics(folder / "run")] == [1, 2, 3, 4, 5, 6]


def test_the_number_of_ranks_changes_no_loss(folder):
    write_config(folder, global_batch_size=6)
    for one, three in zip(train_forked(folder, "one", 1), train_forked(folder, "three", 3), strict=True):
        assert three["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert three["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        assert three["tokens"] == one["tokens"]


def test_a_mesh_of_all_axes_trains_as_one_rank_and_resumes_to_the_bit(folder):
    """pp=2 x tp=2 of four ranks, killed in the middle; who is who is in the log and in ranks.tsv."""
    write_config(folder, global_batch_size=4)
    mesh = ("model.num_layers=3", "parallel.pp=2", "parallel.tp=2", "parallel.sequence_parallel=true")
    whole = train_forked(folder, "whole", 4, *mesh)
    for one, four in zip(train_forked(folder, "one", 1, "model.num_layers=3"), whole, strict=True):
        for figure in ("loss", "grad_norm", "eval_loss"):
            assert four.get(figure, 0.0) == pytest.approx(one.get(figure, 0.0), rel=1e-5)
        assert four["tokens"] == one["tokens"]
    killed = _run(folder, *mesh, run="killed", num_ranks=4, faults=FaultPlan().kill(rank=3, step=4))
    assert killed.returncode != 0
    assert metrics(folder / "killed") == whole[:3]
    rows = [line.split("\t")[-4:] for line in (folder / "killed/ranks.tsv").read_text().splitlines()]
    assert rows == [["pp", "dp", "cp", "tp"], *[[pp, "0", "0", tp] for pp in "01" for tp in "01"]]
    log = "".join(path.read_text() for path in (folder / "killed/logs").glob("*.log"))
    assert "r3 | this rank: pp 1 of 2, dp 0 of 1, cp 0 of 1, tp 1 of 2; layers 2 to 2, head" in log
    assert train_forked(folder, "killed", 4, *mesh) == whole
    assert "resumed from" in (folder / "killed/logs/forked.log").read_text()


def test_a_rank_that_raises_ends_the_job_in_seconds_with_its_error_first(folder):
    """And not when the other rank has waited for it for launch.timeout_s, which takes longer than this test may."""
    write_config(folder, steps=100000, launch={"timeout_s": 600})
    result = _run(folder, faults=FaultPlan().fail(rank=1, step=3))
    assert result.returncode == ExitCode.INTERNAL
    record = json.loads((folder / "run/failure.json").read_text())
    assert (record["rank"], record["exit_code"]) == (1, 1)
    assert "planned fault on rank 1 at step 3" in record["message"]
    log = "".join(path.read_text() for path in sorted((folder / "run/logs").iterdir()))
    errors = [line for line in log.splitlines() if re.search(r" r\d+ \| error \(rank", line)]
    assert "error (rank 1 on" in errors[0]


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["train.global_batch_size=5"], ExitCode.USAGE, "global_batch_size=5 is not a multiple of dp"),
        (["train.stepz=5"], ExitCode.USAGE, "did you mean steps"),
        (["parallel.dp=3"], ExitCode.USAGE, "2 ranks do not fill a mesh"),
        (["parallel.pp=2"], ExitCode.USAGE, "Use parallel.pp=1."),
        (["parallel.tp=2", "model.num_heads=1"], ExitCode.USAGE, "parallel.tp=2 does not split model.num_heads=1"),
        (
            ["parallel.pp=2", "model.num_layers=2", "train.global_batch_size=1"],
            ExitCode.USAGE,
            "it has 1 micro-batches a step; its schedule needs at least 2",
        ),
        (["data.train.0.prefix=nowhere"], ExitCode.DATA, "nowhere"),
    ],
)
def test_bad_input_has_the_exit_code_of_the_table_and_leaves_no_folder(folder, overrides, code, message, capsys):
    write_config(folder)
    assert main(["run", str(folder / "config.yaml"), "-n", "2", "--run-dir", str(folder / "run"), *overrides]) == code
    said = "".join(capsys.readouterr())
    assert message in said
    assert "Traceback" not in said
    assert not (folder / "run").exists()


def test_bad_input_that_ranks_find_has_the_exit_code_of_the_table_and_one_message(folder):
    write_config(folder)
    result = _run(folder, "model.vocab_size=50")
    said = result.stdout + result.stderr
    assert result.returncode == ExitCode.DATA, said
    assert "has the token id 63, and model.vocab_size=50" in said
    # A rank says it once with its prefix; the driver then names the first failure.
    assert len([line for line in said.splitlines() if "| error (rank" in line]) == 1
    assert "Traceback" not in said


def test_data_files_that_are_cut_short_or_not_there_are_refused(folder):
    write_config(folder)
    with pytest.raises(DataError, match="does not exist"):
        train_forked(folder, "run", 2, "data.train.0.loss_mask=true")
    path = folder / "corpus.bin"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"corpus\.bin"):
        train_forked(folder, "run", 2)


def test_a_run_that_is_done_is_gone_on_with_where_it_is_to_be_longer_and_not_by_another_model(folder, alone):
    shutil.copytree(alone[1].parent, folder, dirs_exist_ok=True)
    again = _run(folder)
    assert again.returncode == 0
    assert "is done already" in again.stdout
    longer = _run(folder, "train.steps=7")
    assert longer.returncode == 0, longer.stdout + longer.stderr
    assert "changed since the last attempt: train.steps: 6 -> 7" in longer.stdout
    assert "==== attempt 2" in longer.stdout
    other = _run(folder, "model.hidden_size=64")
    assert other.returncode == ExitCode.USAGE
    assert "another model" in other.stderr and "hidden_size" in other.stderr


def test_damaged_checkpoints_without_a_sound_one_stop_the_run_with_code_5(folder, alone):
    shutil.copytree(alone[1].parent, folder, dirs_exist_ok=True)
    for path in (folder / "run/checkpoints").glob("step_*/*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="none can be read") as caught:
        train_forked(folder, "run", 2, "train.steps=8")
    assert caught.value.exit_code == ExitCode.CHECKPOINT


def test_losses_that_are_not_finite_stop_the_run_after_the_bound(folder):
    write_config(folder, max_skipped_steps=3, steps=50)
    with pytest.raises(HpcTrainError, match="steps in a row") as caught:
        train_forked(folder, "run", 2, "model.init_std=1e39")
    assert caught.value.exit_code == ExitCode.INTERNAL
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines[-3:]] == [True] * 3

"""`hpc-train profile`: fits, what is refused, and a real measurement on two ranks that a plan is then made with."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.cli import main
from hpc_train.comm.groups import build_groups
from hpc_train.errors import ConfigError
from hpc_train.launch.exec_task import ProgramFailed
from hpc_train.launch.ranks import RanksEnd
from hpc_train.launch.record import decide_outcome, failure_text
from hpc_train.log import report_failure
from hpc_train.plan.batch_profile import load_profile
from hpc_train.plan.groups import training_plan
from hpc_train.plan.mesh import Mesh
from hpc_train.train.profile_layer import LayerTimes, line_of, sequence_sizes, time_layer
from hpc_train.train.profile_ranks import profile_of_measured, report_refusal
from tests.data.corpora import numbered, write
from tests.launch.test_exec_mpi import environment
from tests.plan.test_batch_profile import MESH, hdp_config
from tests.ranks import TestRank, run_ranks
from tests.train.trainers import TREES, make_config
from tests.worlds import make_world


def times_of(square: float, linear: float, constant: float = 0.0, longest: int = 8192, block: int = 128) -> LayerTimes:
    def one(tokens: int) -> float:
        return square * tokens**2 + linear * tokens

    many = longest // block * one(block)
    return LayerTimes(longest, block, one(longest), many, one(block) + constant)


@given(square=st.floats(1e-13, 1e-9), linear=st.floats(1e-8, 1e-5), constant=st.floats(0.0, 1e-2))
def test_a_layer_s_own_times_are_found_again(square: float, linear: float, constant: float) -> None:
    found = times_of(square, linear, constant).parts()
    assert found[:2] == pytest.approx((square, linear), rel=1e-3)
    assert found[2] == pytest.approx(constant, rel=1e-3, abs=1e-3 * linear)


@given(st.integers(1, 10_000), st.integers(1, 16))
def test_sequences_are_multiples_of_what_they_are_split_by(longest: int, unit: int) -> None:
    length, block = sequence_sizes(longest, unit)
    assert length % block == block % unit == 0 and length >= 2 * block
    assert length <= max(longest, 2 * block)


def test_a_line_goes_through_its_points_or_begins_at_nothing() -> None:
    line = line_of(10, 30, 5.0, 9.0)
    assert (line.s_per_unit, line.constant_s) == (0.2, 3.0)
    line = line_of(10, 30, 1.0, 9.0)
    assert (line.s_per_unit, line.constant_s) == (0.3, 0.0)


def _timed_layers(me: TestRank) -> list[tuple[int, int, bool]]:
    groups, found = build_groups(make_world(me), training_plan(Mesh(pp=1, dp=1, cp=1, tp=2), with_tied=False)), []
    for sequence_parallel in (False, True):
        parallel = {"tp": 2, "tp_tiles": 3, "sequence_parallel": sequence_parallel, "hdp": {"capacity_tokens": 162}}
        times = time_layer(make_config(TREES["llama"], parallel), groups, torch.device("cpu"), 162, 1)
        found.append((times.longest, times.block, min(times.one_s, times.many_s, times.block_s) > 0))
    return found


@pytest.mark.timeout(300)
def test_a_layer_is_timed_with_rows_that_tiles_cut_as_training_does() -> None:
    """A quarter of 162 tokens is 40, which 3 tiles do not cut, and 6 parts neither."""
    assert run_ranks(_timed_layers, 2, timeout_s=240) == [[(156, 39, True), (144, 36, True)]] * 2


class _Groups:
    mesh = MESH


def entry(node: str, layer: LayerTimes, **more: float) -> dict[str, object]:
    rates = {"ring_s_per_byte": 1e-10, "ring_s_per_step": 0.0, "copy_s_per_byte": 1e-10, **more}
    return {"node": node, "layer": asdict(layer), **rates}


def layer(scale: float) -> LayerTimes:
    return times_of(scale * 1e-11, scale * 1e-7)


def test_a_layer_is_that_of_the_middle_rank_and_transfers_those_of_the_slowest() -> None:
    slow = entry("b", layer(2), ring_s_per_byte=3e-10)
    report = [entry("a", layer(1)), entry("a", layer(1.01)), slow, entry("c", layer(1.02))]
    profile = profile_of_measured(hdp_config(), _Groups(), report, "a test")  # type: ignore[arg-type]
    assert profile.attention_s_per_square == pytest.approx(1.02e-11, rel=1e-3)
    assert profile.ring_s_per_byte == 3e-10
    assert profile.speeds == {"b": pytest.approx(0.51, abs=0.01)}
    alone = profile_of_measured(hdp_config(), _Groups(), [entry("a", layer(1)), entry("a", layer(2))], "a test")  # type: ignore[arg-type]
    assert alone.speeds == {}


@pytest.mark.parametrize(
    "wrong",
    [LayerTimes(8192, 128, 1.0, 1.0, 1.0), LayerTimes(8192, 128, 1.0, 2.0, 0.1), LayerTimes(8, 2, math.nan, 1, 1)],
)
def test_times_that_do_not_grow_as_a_layer_s_are_refused(wrong: LayerTimes) -> None:
    with pytest.raises(ConfigError, match=r"not how its time grows\. Measure on nodes that do nothing else"):
        profile_of_measured(hdp_config(), _Groups(), [entry("a", wrong)], "a test")  # type: ignore[arg-type]


def test_what_a_rank_refuses_is_what_the_command_ends_with(tmp_path: Path) -> None:
    """And not that Python ended with a code, which the task beside the rank sees a moment later."""
    report_refusal(ConfigError("times that do not grow"), 1, "n0", {"HPC_TRAIN_RUN_DIR": str(tmp_path)})
    report_failure(ProgramFailed("python ended with exit code 2", 2), run_dir=tmp_path, rank=1, host="n0")
    outcome = decide_outcome(tmp_path, RanksEnd(2), any_code=True)
    assert (outcome.exit_code, outcome.reason) == (2, "rank 1 on n0: times that do not grow")
    assert outcome.failure is not None and failure_text(outcome.failure).endswith("exit code 2: times that do not grow")


WORDS = (
    "data.train.0.prefix=set", "data.heldout=[]", "train.eval_every=0", "data.seq_len=16384", "model.vocab_size=65536",
    "train.global_batch_size=4", "train.micro_batch_size=1", "parallel.hdp.capacity_tokens=2048",
)  # fmt: skip


@pytest.mark.mpi
@pytest.mark.long  # a busy machine measures what makes no sense
def test_two_ranks_measure_what_a_plan_is_made_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "hpc_train", "profile", "tiny", *WORDS, "--repeats", "3", "--out", "costs.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    profile = load_profile(str(tmp_path / "costs.json"))
    assert "measured" in profile.origin and "2 ranks of 1 nodes, CPU" in profile.origin
    assert f"hash {profile.hash[:16]}" in done.stdout
    write(tmp_path / "set", numbered([15_000, 90, 600, *[30] * 50]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpc_train.cluster.scratch.use_private_caches", lambda: None)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    nodes = ("-N", "1", "--ntasks-per-node", "8", "--batch", "1")
    assert main(["plan", "tiny", *WORDS, *nodes, "parallel.hdp.profile=costs.json"]) == 0
    assert "costs: measured" in capsys.readouterr().out
    assert main(["plan", "tiny", *WORDS, *nodes, "parallel.hdp.profile=costs.json", "model.hidden_size=64"]) == 2
    assert "hidden_size 128 and not 64" in capsys.readouterr().err


def test_fewer_ranks_than_a_ring_needs_are_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "tiny", *WORDS, "parallel.tp=2", "-n", "3"]) == 2
    said = capsys.readouterr().err
    assert "3 ranks with parallel.tp=2 are one hdp rank" in said and "Start 4 ranks or more" in said


def test_a_folder_that_is_not_there_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "tiny", "-n", "2", "--out", "nowhere/costs.json"]) == 2
    said = capsys.readouterr().err
    assert "nowhere/costs.json cannot be written: No such file" in said and "by --out" in said
